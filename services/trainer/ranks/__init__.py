"""A trainer of several processes: the first rank speaks, the others follow."""
