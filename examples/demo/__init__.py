"""The demo: a small model that learns to use a tool, from nothing, on this machine."""
