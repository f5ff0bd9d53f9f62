"""``gspo plan``: whether a job fits its GPUs, and under which settings. It reads two small files and asks no server."""

from __future__ import annotations

import json
from pathlib import Path

from gspo_core.cli.command import CommandError


def plan(file: str, gpus: str, *, as_json: bool) -> int:
    """Returns 1 where the job does not fit."""
    from gspo_core.plan import UnknownShape, describe, parse_machines, plan_job, plan_view
    from gspo_core.spec_file import SpecFileError, load_job_spec

    try:
        found = plan_job(load_job_spec(Path(file)), parse_machines(gpus))
    except (SpecFileError, UnknownShape, ValueError) as error:
        raise CommandError(str(error)) from error
    print(json.dumps(plan_view(found), indent=2) if as_json else "\n".join(describe(found)))
    return 1 if found.refusal else 0
