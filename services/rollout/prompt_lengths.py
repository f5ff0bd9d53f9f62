"""Measures the first prompts of an environment in tokens of a model.

Rule: only the chat format is loaded, as for a job, and no weights. It compares with no limit; the asker does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

from gspo_core.environment_records import Starts
from gspo_core.job_spec import ChatSpec
from gspo_core.json_value import JSON
from services.workers.loading import JobNotServable, read_model


def longest_prompt(model: str, chat: Mapping[str, JSON], found: JSON) -> dict[str, JSON]:
    """The longest of ``found`` as a request's answer. It reads files: call it in a thread."""
    starts = cast(Starts, found)
    try:
        codec, model_tokens, _ = read_model(Path(model), ChatSpec.model_validate(chat))
        lengths = {one["task"]: len(codec.render(one["messages"], one["tools"])) for one in starts["starts"]}
    except (JobNotServable, ValueError) as error:
        return {"error": str(error)}
    if not lengths:
        return {"error": "no prompt is short enough to be handed over"}
    task = max(lengths, key=lengths.__getitem__)
    limits = cast(JSON, dict(starts["limits"]))
    return {"result": {"task": task, "tokens": lengths[task], "model_tokens": model_tokens, "limits": limits}}
