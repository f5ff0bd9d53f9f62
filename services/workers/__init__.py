"""What every process does that holds episodes, whatever drives them: leases, beats, engines, attempts, outcomes.

Rollout workers drive their episodes with an environment, the gateway lets agents drive theirs. ``EpisodeWorker`` is the
whole of it; ``job`` holds the episodes of one job, ``episode`` one of them, ``engines`` finds who samples for them.
"""
