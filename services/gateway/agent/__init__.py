"""Episodes whose agent asks for their turns; without HTTP.

``door`` finds the episode of a key, ``episode`` answers one request of it (``plan`` its prompt, ``live`` the turn in
progress, ``budget`` its limits), ``attempt`` begins and ends it (``pulled``: agents that come for it, ``judging`` and
``rewards``: what it is paid). ``talking`` is for keys without an episode, ``traffic`` for what is kept of theirs.
"""
