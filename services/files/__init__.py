"""A job's directory: paths, fsync, rename, retention. What the bytes mean is the business of `gspo_core`."""
