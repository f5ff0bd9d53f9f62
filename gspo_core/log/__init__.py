"""The files of a job as bytes and as nouns: batch logs, log-probs when trained, manifests, checkpoints, records.

The rule: pure functions between bytes and nouns. Nothing here opens a file, knows a path or asks a clock; services
decide where the bytes lie and when they are durable. What is read is exactly what was written, or an error says why
not. A change of the bytes is a new format number, because an installation goes on with files of the release before.
"""
