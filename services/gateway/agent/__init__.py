"""Episodes whose agent asks for their turns; without HTTP.

``door`` finds the episode of a key, ``episode`` answers one request of it (``plan`` its prompt, ``live`` the turn in
progress, ``budget`` its limits), ``attempt`` begins and ends it (``pulled``: agents that come for it, ``judging`` and
``late``: rewards that others give). ``talking`` is for keys without an episode.
"""
