"""The processes (folders) and the plumbing that they share (files)."""
