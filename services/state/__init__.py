"""Redis, and nothing else does Redis: connection, roles, the server-side functions, queue and control plane."""
