"""Submissions of callers, judged and translated: jobs, environments of jobs, trajectories."""
