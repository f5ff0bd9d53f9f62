"""What every request passes: access, errors, repeats, limits, streams; and what routes work with."""
