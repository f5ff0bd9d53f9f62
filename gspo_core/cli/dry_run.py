"""What ``gspo submit --dry-run`` says: the verdict first, then what the job takes, then what could not be checked."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from gspo_core.api_answers import Plan


def lines_of(plan: Plan, said: Collection[str]) -> Iterator[str]:
    """``said``: warnings that were told already."""
    warnings = [warning for warning in plan["warnings"] if warning not in said]
    open_questions = plan.get("unchecked", ())
    number = len(plan["warnings"])
    but = f", with {number} warning{'s' * (number > 1)}" if number else ""
    yield f"the specification is valid{but}; nothing was created"
    config: Mapping[str, Any] = plan["config"]
    environments = ", ".join(one["ref"] for one in config["environments"])
    yield (
        f"{config['steps']} steps of {config['groups_per_step']} groups of {config['rollout']['group_size']} episodes "
        f"of {environments}, on {config['model']}"
    )
    yield from (f"  {line}" for line in _sizes(plan["estimate"]))
    yield from (f"warning: {warning}" for warning in warnings)
    yield from (f"not checked: {question}" for question in open_questions)
    yield "--json prints the specification with every default, and all numbers"


def _sizes(estimate: Mapping[str, int]) -> Iterator[str]:
    yield (
        f"at most {estimate['max_episodes_in_flight']:,} episodes in flight, and "
        f"{estimate['max_sampled_tokens_per_step']:,} sampled tokens a step"
    )
    if "max_archive_bytes" in estimate:  # releases before did not say
        logs, archive = (estimate[name] / 1e6 for name in ("max_log_bytes", "max_archive_bytes"))
        a_token = estimate["log_bytes_per_sampled_token"]
        more = f"; of that the archive at most {archive:,.0f} MB by the end, before it is compressed" if archive else ""
        yield (
            f"batch logs take at most {logs:,.0f} MB, {a_token} bytes a sampled token where episodes reach their limits"
            f"{more}"
        )
    if "max_checkpoints" in estimate:
        number, size = estimate["max_checkpoints"], estimate.get("max_checkpoint_bytes")
        taken = "" if size is None else f", which take at most {size / 1e6:,.0f} MB"
        yield (
            f"at most {number} checkpoints at a time{taken}; a replay or fork of a step trains at most "
            f"{estimate['max_replayed_steps']} logged steps again on its way"
        )
