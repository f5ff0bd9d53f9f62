"""A trainer of several processes: the first rank leads, the others follow."""
