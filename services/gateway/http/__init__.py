"""The gateway's HTTP: ``app`` has the routes, ``requests`` reads one, ``streams`` answers it, ``bodies``, ``nodes`` and
``seats`` bound what comes, ``routing`` and ``forwarding`` find the gateway that holds an episode.
"""
