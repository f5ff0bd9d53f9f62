"""A job's directory: paths, fsync, rename, retention. `gspo_core` gives the bytes their meaning."""
