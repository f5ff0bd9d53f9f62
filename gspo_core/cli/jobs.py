"""``gspo submit``, ``jobs``, ``pause``, ``resume``, ``cancel``: a request each, and an answer that fits on a screen."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from gspo_core.api_answers import Settings
from gspo_core.cli.command import CommandError
from gspo_core.cli.connection import connected
from gspo_core.cli.dry_run import lines_of
from gspo_core.cli.naming import job_meant
from gspo_core.cli.terminal import counted, say
from gspo_core.idempotency_key import IN_WORDS, KEY
from gspo_core.json_value import JSON
from gspo_core.strict_json import TextRejected, typed_value

# No job has a step of sixteen digits.
_STEP = re.compile(r"[0-9]{1,15}")
Verb = Literal["pause", "resume", "cancel"]


def submit(url: str, file: str, *, dry_run: bool, watch: bool, key: str | None = None, as_json: bool = False) -> int:
    from gspo_core.spec import spec_warnings
    from gspo_core.spec_file import SpecFileError, load_job_spec

    if dry_run and (watch or key is not None):
        raise CommandError(f"{'--watch' if watch else '--key'} is for a job, and --dry-run creates none")
    if as_json and not dry_run:
        raise CommandError("--json prints all of the answer of --dry-run: give both")
    if key is not None and not KEY.fullmatch(key):
        raise CommandError(f"--key {key!r}: {IN_WORDS}")
    try:
        spec = load_job_spec(Path(file))
    except SpecFileError as error:
        raise CommandError(str(error)) from error
    for warning in spec_warnings(spec):
        print(f"warning: {warning}", file=sys.stderr)
    with connected(url) as client:
        if dry_run:
            plan = client.plan_job(spec)
            say(*([json.dumps(plan, indent=2)] if as_json else lines_of(plan, set(spec_warnings(spec)))))
            return 0
        job = client.create_job(spec, idempotency_key=key)
    print(job["id"])
    if not watch:
        print(f"follow it with: gspo watch {job['id']}", file=sys.stderr)
        return 0
    from gspo_core.cli.watch import watch as follow

    return follow(url, job["id"], as_json=False)


def remove(url: str, given: Sequence[str], *, is_sure: bool) -> int:
    """``gspo rm JOB...``: removes jobs that are over. It asks first about those not named by their whole ids."""
    meant = {text: job_meant(url, text) for text in given}
    unsure = [job for text, job in meant.items() if text != job]
    if unsure and not is_sure:
        if not sys.stdin.isatty():
            raise CommandError(f"that would remove {', '.join(unsure)}: write whole ids, or add --yes")
        if not _is_confirmed(f"remove {', '.join(unsure)} with all that was made? [y/N] "):
            raise CommandError("nothing is removed")
    jobs, gone = dict.fromkeys(meant.values()), []
    with connected(url) as client:
        there = {job["id"] for job in client.jobs()}
        for job_id in jobs:
            if job_id in there:
                client.remove_job(job_id)
                print(f"{job_id} is removed")
            else:
                gone.append(job_id)
    if gone:
        raise CommandError(f"there is no job {', '.join(gone)}")
    return 0


def _is_confirmed(question: str) -> bool:
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False


def change(url: str, job_id: str, assignments: Sequence[str]) -> int:
    """``gspo set JOB optimizer.lr=5e-7``: values are read as JSON, else taken as text."""
    changes: Settings = {}
    for assignment in assignments:
        key, is_assigned, text = assignment.partition("=")
        if not is_assigned:
            raise CommandError(f"{assignment}: write KEY=VALUE, for example optimizer.lr=5e-7")
        *sections, name = key.split(".")
        place = changes
        for section in sections:
            inner = place.setdefault(section, {})
            if not isinstance(inner, dict):
                raise CommandError(f"{assignment}: {section} was already given a value")
            place = inner
        try:
            place[name] = typed_value(text)
        except TextRejected as error:
            raise CommandError(f"{assignment}: {error}") from error
    with connected(url) as client:
        job = client.change(job_id, changes)
    print(f"{job['id']} continues from its next step with {json.dumps(job['settings'])}")
    return 0


_REACHED = {"pause": ("paused",), "resume": ("running",), "cancel": ("succeeded", "failed", "cancelled")}
_ASKED = {"pause": "to pause", "resume": "to resume", "cancel": "to end"}


def control(
    url: str,
    job_id: str,
    verb: Verb,
    *,
    drain: bool = False,
    checkpoint: bool = False,
    from_step: int | None = None,
    steps: int | None = None,
    horizon: int | None = None,
) -> int:
    """``pause``, ``resume`` and ``cancel``: wishes, which the job's trainer brings about."""
    words = ""
    with connected(url) as client:
        match verb:
            case "pause":
                job = client.pause(job_id)
            case "resume":
                job = client.resume(job_id, from_step=from_step, steps=steps, horizon=horizon)
                if steps is not None and horizon is None:
                    words = told_of_idle_steps(client.config(job_id), job["settings"], job["steps"])
            case "cancel":
                job = client.cancel(job_id, drain=drain, checkpoint=checkpoint)
    is_there = job["status"] in _REACHED[verb]
    print(f"{job['id']} is {job['status']}" + ("" if is_there else f"; it was asked {_ASKED[verb]}"))
    if words:
        print(words)
    return 0


def told_of_idle_steps(spec: Settings, settings: Settings, steps: int) -> str:
    """A longer job keeps its schedule, so its last steps may have a rate of 0; empty if they have not."""
    optimizer, end = spec["optimizer"], settings.get("optimizer.decay_steps")
    assert isinstance(optimizer, dict)
    if not isinstance(end, int) or end >= steps or optimizer["min_lr_ratio"]:
        return ""
    return (
        f"The learning rate still ends at step {end}: the {steps - end} steps after it train at rate 0 and change "
        f"nothing. --horizon {steps} would end it there."
    )


def fork(
    url: str,
    where: str,
    assignments: Sequence[str],
    *,
    same_batches: bool,
    name: str | None,
    dry_run: bool,
    rewards: str | None = None,
    last: int | None = None,
    without: Sequence[str] = (),
) -> int:
    """``gspo fork JOB@STEP --set KEY=VALUE``: says what it takes before it is made."""
    named, is_given, text = where.partition("@")
    if not named or (is_given and _STEP.fullmatch(text) is None):
        raise CommandError(f"{where}: write JOB@STEP")
    step = int(text) if is_given else None
    changes, given = _assigned(assignments), read_rewards(rewards)
    acting = [option for option, one in (("--rewards", given), ("--last", last), ("--without", without)) if one]
    if acting and not same_batches:
        raise CommandError(f"{acting[0]}: of what it is fed; add --same-batches")
    job_id = job_meant(url, named)
    with connected(url) as client:
        plan = client.plan_fork(
            job_id, step, changes=changes, same_batches=same_batches, last=last, without=without, rewards=given
        )
        begins = "the base model" if plan["from_checkpoint"] is None else f"checkpoint {plan['from_checkpoint']}"
        fed = f", then {plan['same_batches']} of its parent's batches" if same_batches else ""
        fed += f" without {', '.join(without)}" if without else ""
        again = counted(plan["replayed_steps"], "step")
        said = f"from {begins}, {again} trained again to get to step {plan['step']}{fed}"
        print(said, file=sys.stderr)
        if dry_run:
            return 0
        job = client.fork(
            job_id,
            plan["step"],
            changes=changes,
            same_batches=same_batches,
            last=last,
            without=without,
            rewards=given,
            name=name,
        )
    print(job["id"])
    print(f"follow it with: gspo watch {job['id']}", file=sys.stderr)
    return 0


def retrain(
    url: str,
    named: str,
    assignments: Sequence[str],
    *,
    first: int | None,
    last: int | None,
    rewards: str | None,
    traces: str | None,
    name: str | None,
    dry_run: bool,
) -> int:
    """``gspo retrain JOB``: says what it is trained on before it is made."""
    changes, given, groups = _assigned(assignments), read_rewards(rewards), _read_traces(traces)
    job_id = job_meant(url, named)
    with connected(url) as client:
        plan = client.plan_retrain(job_id, first=first, last=last, rewards=given, traces=groups, changes=changes)
        steps = f"steps {plan['first']} to {plan['last']} of {job_id}"
        what = f"{counted(len(groups), 'group')} of traces" if groups else steps
        other = f", {counted(plan['rewards'], 'episode')} with another reward" if given else ""
        print(f"{what}, in {counted(plan['steps'], 'step')}{other}", file=sys.stderr)
        if dry_run:
            return 0
        job = client.retrain(job_id, first=first, last=last, rewards=given, traces=groups, changes=changes, name=name)
    print(job["id"])
    print(f"follow it with: gspo watch {job['id']}", file=sys.stderr)
    return 0


def read_rewards(file: str | None) -> dict[str, float]:
    """By episode. Raises CommandError."""
    found = _rewards_in(_read_json(file))
    if found is None:
        raise CommandError(f'{file}: write {{"GROUP/MEMBER": REWARD, ...}}, as gspo rescore --to does')
    return found


def _read_traces(file: str | None) -> list[dict[str, float]]:
    found = None if file is None else _read_json(file)
    groups = [_rewards_in(one) for one in found] if isinstance(found, list) else []
    told = [one for one in groups if one]
    if file is not None and (not told or len(told) < len(groups)):  # of none, recorded steps would be taken instead
        raise CommandError(f'{file}: write a list of groups, each {{"TRACE": REWARD, ...}}')
    return told


def _rewards_in(found: JSON) -> dict[str, float] | None:
    """None: it is none, or something in it is no number."""
    given = found if isinstance(found, dict) else {"": None}
    numbers = {name: one for name, one in given.items() if isinstance(one, int | float)}
    sound = {name: float(one) for name, one in numbers.items() if abs(one) <= sys.float_info.max}
    return sound if len(sound) == len(given) else None


def _read_json(file: str | None) -> JSON:
    try:
        found: JSON = {} if file is None else json.loads(Path(file).read_text())
    except (OSError, ValueError) as error:
        raise CommandError(f"{file}: {error}") from error
    return found


def _assigned(assignments: Sequence[str]) -> dict[str, JSON]:
    """By key; values are read as JSON, else taken as text."""
    from gspo_core.log.changes import ImpossibleChange, parse_assignments

    try:
        return parse_assignments(assignments)
    except ImpossibleChange as error:
        raise CommandError(str(error)) from error
