"""Whether the ranks can be divided as a job asks: into those that share sequences, and into copies of the model.

One rule: the learner and the plan refuse by the same function, before anything is loaded.
"""

from __future__ import annotations

from gspo_core.learner_config import LearnerOptions


def arrangement_problem(options: LearnerOptions, num_ranks: int, num_heads: int | None = None) -> str | None:
    """What stands against it, and what to set instead. `num_heads`: those of attention, where they are known."""
    shared, copies = options.context_parallel, options.replicas
    if num_ranks % shared:
        return f"learner.context_parallel: {shared} does not divide the number of ranks, {num_ranks}"
    if num_ranks % copies:
        return f"learner.replicas: {copies} does not divide the number of ranks, {num_ranks}"
    if copies > 1 and copies == num_ranks:
        return f"learner.replicas: {copies} copies leave one rank to each; at least two must share one"
    if num_heads is not None and num_heads % shared:
        return f"learner.context_parallel: {shared} ranks cannot share {num_heads} heads of attention"
    return None
