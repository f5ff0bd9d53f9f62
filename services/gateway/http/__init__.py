"""The gateway's HTTP: ``app`` has the routes, ``requests`` reads one, ``streams`` answers it, ``bodies`` bounds
what comes, ``forwarding`` finds the gateway that holds an episode.
"""
