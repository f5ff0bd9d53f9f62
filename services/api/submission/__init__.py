"""What callers send in, judged and translated: jobs, environments of jobs, trajectories."""
