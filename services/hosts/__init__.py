"""Where environments run: hosts beside a worker or elsewhere, their pools and sessions."""
