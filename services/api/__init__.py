"""The REST API: a process of its own that holds no state outside Redis, so it survives every other one."""
