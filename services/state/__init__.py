"""The only package that talks to Redis: connection, roles, server-side functions, queue and control plane."""
