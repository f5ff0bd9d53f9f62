"""The rollout worker: holds many multi-turn episodes at once and streams their segments.

Reading order: ``attempt`` (the turns of an episode that its environment drives), ``request_runner`` (what a person asks
of a running worker), ``__main__`` (the process). Attempts until one has an outcome, engines, jobs and leases are in
`services.workers`; tokens, history and outbox in `services.episodes`. No module here imports torch.
"""
