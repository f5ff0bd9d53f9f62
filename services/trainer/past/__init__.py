"""Persists a run and resumes it: background writing, recovery, replay."""
