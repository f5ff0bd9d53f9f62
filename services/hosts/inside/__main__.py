"""``python -m services.hosts.inside CONTROL PARENT``: started by `services.hosts.server`, never by hand."""

from __future__ import annotations

import sys

from services.hosts.inside.fork_server import run, serve_again

if __name__ == "__main__":
    if sys.argv[1] == "again":
        serve_again(*map(int, sys.argv[2:5]))
    else:
        run(int(sys.argv[1]), int(sys.argv[2]))
