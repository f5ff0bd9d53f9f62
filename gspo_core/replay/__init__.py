"""The time machine: steps of a job's past trained again, as they were or otherwise.

Read `replaying` first; below it `journey` (the learner at any step), `past` (a job's files), `comparison` and
`token_shares`. It needs the files of one job and its base model: no Redis, no engine, no service.
"""
