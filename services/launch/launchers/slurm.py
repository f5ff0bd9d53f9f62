"""``gspo launch slurm``: writes a batch script that runs the stack on a Slurm allocation.

Rule: it only writes. The script needs the code, its Python and a directory that all nodes share. It keeps there
everything that must outlive the allocation, so resubmitting the script resumes where it ended. It submits its job
under its own idempotency key, so the job resumes too. What the script runs is ``services.launch.slurm_run``.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import shlex
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

from gspo_core.cli.command import CommandError
from services.launch import placement_options, slurm_run, topology
from services.launch.crew import SLACK_S
from services.launch.engine_command import find_sglang
from services.launch.installation import CODE
from services.launch.outside_settings import refuse_decided
from services.launch.placement import Member, PlacementError, described, place
from services.launch.placement_options import Where, check_engine, chosen_engine, cluster_wanted, megabytes
from services.launch.slurm_steps import check_log_path
from services.launch.topology import Site

HELP = "write a batch script that runs the stack over an allocation"
# Slurm signals up to a minute early, and processes take a while to start.
LEAST_RUN_S = 300
# For the script itself and the follower of the job, on the first node.
OWN_MEMORY_MB = 1024
# Handed on to sbatch as they are.
PLAIN = ("--partition", "--account", "--qos", "--constraint", "--reservation")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--project", help="checkout to run, with its .venv (default: what this command runs from)")
    parser.add_argument("--python", help="Python with what it needs (default: of --project, else of this command)")
    slurm_run.add_options(parser)
    parser.add_argument("--time", default="24:00:00")
    for option in PLAIN:
        parser.add_argument(option)
    parser.add_argument("--gpu-type", help="type of the GPUs, where Slurm knows several")
    parser.add_argument("--cpus-per-task", type=int, help="cores on each node (default: what the processes need)")
    parser.add_argument("--mem", help="memory on each node, such as 900G (default: what the processes need)")
    parser.add_argument("--output", metavar="FILE", help="where to write the script (default: the terminal)")
    placement_options.add_plan(parser)


def run(arguments: argparse.Namespace) -> int:
    """Raises CommandError."""
    _check_words(arguments)
    refuse_decided(arguments.data_dir)
    try:
        members = place(cluster_wanted(arguments), Site.BATCH)
        where = Where.IMAGE if arguments.container else Where.PERHAPS_HERE
        if os.sep in (arguments.sglang_python or ""):
            arguments.sglang_python = os.path.abspath(arguments.sglang_python)
        engine = chosen_engine(arguments, on_gpu=arguments.gpus_per_node > 0, has_keys=True, where=where)
        check_engine(engine, members)
        if engine is not None and arguments.sglang is not None:  # found from here, not from where the script runs
            arguments.sglang_python = engine.words[0]
            _tell_absent(arguments.sglang_python, where)
        directives = _directives(arguments, members)
    except PlacementError as error:
        raise CommandError(str(error)) from error
    plan = described(members, nodes=arguments.nodes)
    if arguments.plan:
        print("\n".join((plan, *directives)))
        return 0
    project, python = _what_runs(arguments)
    script = _SCRIPT.format(
        directives="\n".join(directives),
        plan="\n".join([*(f"# {line.strip()}" for line in plan.splitlines()), *_job_line(arguments)]),
        project=shlex.quote(project),
        python=shlex.quote(python),
        words=" \\\n  ".join(shlex.join(words) for words in _passed_on(arguments)),
        site_ports=" ".join(f'"${{{name}:={port}}}"' for name, port in slurm_run.PORTS.items()),
        ports=",".join(f"${name}" for name in slurm_run.PORTS),
    )
    if _write(script, arguments.output):
        print(f"{plan}\nsubmit it with: sbatch {arguments.output}", file=sys.stderr)
    return 0


def _tell_absent(python: str, where: Where) -> None:
    """Where the script is written may be a machine that runs none of it."""
    if where is Where.PERHAPS_HERE and find_sglang(python) is None:
        print(f"--sglang-python {python} is not here: the script refuses if it lacks it too", file=sys.stderr)


def _what_runs(arguments: argparse.Namespace) -> tuple[str, str]:
    """The folder of the code, and the Python: what runs here unless it is said, be it installed or a checkout."""
    project = os.path.abspath(arguments.project or CODE)
    own = os.path.join(project, ".venv", "bin", "python") if arguments.project else sys.executable
    return project, os.path.abspath(arguments.python) if arguments.python else own


def _check_words(arguments: argparse.Namespace) -> None:
    """What becomes a line of the script, or an option of srun, is one word. Raises CommandError."""
    for option in (*PLAIN, "--time", "--gpu-type", "--mem", "--container"):
        value = getattr(arguments, option.removeprefix("--").replace("-", "_"))
        if value is not None and (not value or any(letter.isspace() for letter in value)):
            raise CommandError(f"{option} {value!r} is not one word")
    placement_options.check_key(arguments)
    if arguments.gpu_type and not arguments.gpus_per_node:
        raise CommandError("--gpu-type says of which type the GPUs are, and there are none: give --gpus-per-node")
    data_dir = os.path.abspath(arguments.data_dir)
    check_log_path(data_dir)
    if arguments.container:
        slurm_run.check_mounts(slurm_run.mounted(data_dir, placement_options.model_of(arguments)))
    for option in arguments.srun:
        if option.startswith("-"):
            raise CommandError(f"--srun {option}: options of srun are given without --, such as {option.lstrip('-')}")
    if arguments.job and not os.path.exists(arguments.job):
        print(f"{arguments.job} is not there yet: the script submits it when it runs", file=sys.stderr)


def _write(text: str, output: str | None) -> bool:
    """Write ``text`` to the file ``output`` or the terminal. Returns whether it was a file; raises CommandError."""
    for line in text.splitlines():
        if not _is_text(line):
            raise CommandError(f"{line.strip()!r} has bytes that are no UTF-8, which the script cannot hold: rename it")
    if output is None:
        sys.stdout.write(text)
        return False
    path = Path(output)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from error
    return True


def _is_text(line: str) -> bool:
    """Not so where an option has bytes that could not be decoded."""
    try:
        line.encode()
    except UnicodeEncodeError:
        return False
    return True


def _directives(arguments: argparse.Namespace, members: Sequence[Member]) -> list[str]:
    cpus = max(sum(one.cpus for one in own) for own in _by_node(arguments.nodes, members))
    memory = max(sum(one.memory_mb for one in own) for own in _by_node(arguments.nodes, members)) + OWN_MEMORY_MB
    if arguments.cpus_per_task is not None and arguments.cpus_per_task < cpus:
        raise PlacementError(
            f"the processes of a node need {cpus} cores, not --cpus-per-task {arguments.cpus_per_task}"
        )
    if arguments.mem is not None and megabytes(arguments.mem) < memory:
        raise PlacementError(f"a node's processes need {memory} MB, more than --mem {arguments.mem}")
    lead_s = topology.leaving_s(Site.BATCH) + SLACK_S * len({one.process.name for one in members})
    limit_s, least_s = _seconds(arguments.time), lead_s + LEAST_RUN_S
    if limit_s and limit_s < least_s:
        raise PlacementError(
            f"--time {arguments.time} is {limit_s} s, and {lead_s} s before its end all are told to leave: it takes "
            f"{least_s} s ({math.ceil(least_s / 60)} minutes) to train anything"
        )
    kind = f"gpu:{arguments.gpu_type}" if arguments.gpu_type else "gpu"
    directives = {
        "job-name": "gspo",
        "nodes": str(arguments.nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": str(arguments.cpus_per_task or cpus),
        "mem": arguments.mem or f"{memory}M",
        "gres": f"{kind}:{arguments.gpus_per_node}" if arguments.gpus_per_node else None,
        "time": arguments.time,
        **{option.removeprefix("--"): getattr(arguments, option.removeprefix("--")) for option in PLAIN},
        # Told before the time limit, to leave in order; queued again when preempted or when a node is lost.
        "signal": f"B:TERM@{lead_s}",
        "requeue": "",
        "open-mode": "append",
    }
    return [f"#SBATCH --{name}{'=' * bool(value)}{value}" for name, value in directives.items() if value is not None]


def _seconds(limit: str) -> int | None:
    """Reads a time limit in any form of Slurm's, where 0 is none; None for a word, which Slurm may know."""
    days, is_days, rest = limit.rpartition("-")
    fields = rest.split(":")
    if len(fields) > 3 or not all(one.isdecimal() for one in (*fields, *([days] if is_days else []))):
        return None
    units = (3600, 60, 1) if is_days or len(fields) == 3 else (60, 1)  # minutes come first where nothing is longer
    return 86400 * int(days or 0) + sum(int(one) * unit for one, unit in zip(fields, units, strict=False))


def _by_node(nodes: int, members: Sequence[Member]) -> list[list[Member]]:
    return [[one for one in members if one.node == node] for node in range(nodes)]


def _passed_on(arguments: argparse.Namespace) -> list[list[str]]:
    """The options that the script hands to what it runs, each with its values; paths hold wherever it runs."""
    # With = also what begins with - is a value.
    options = [
        [f"--data-dir={os.path.abspath(arguments.data_dir)}"],
        [f"--model={placement_options.model_of(arguments)}"],
    ]
    if arguments.job:
        options.append([f"--job={os.path.abspath(arguments.job)}"])
        options.append([f"--key={arguments.key or _kept_key(arguments) or f'slurm-{uuid.uuid4().hex}'}"])
    parser = argparse.ArgumentParser(add_help=False)
    placement_options.add_counts(parser)
    placement_options.add_engine(parser)
    placement_options.add_cluster(parser)
    slurm_run.add_steps(parser)
    for action in parser._actions:
        value = getattr(arguments, action.dest)
        if value is None or value == action.default:
            continue
        name = action.option_strings[0]
        options.append([name, *map(str, value)] if isinstance(value, list) else [f"{name}={value}"])
    return options


def _kept_key(arguments: argparse.Namespace) -> str | None:
    """The key in the script that is about to be overwritten, if it submits the same job: with another key it would be a
    second job."""
    script = Path(arguments.output or os.devnull)
    try:
        text = script.read_text(encoding="utf-8") if script.is_file() else ""
        words = shlex.split(text.partition("\nexec ")[2])
    except (OSError, ValueError):
        return None
    found = dict(word.split("=", 1) for word in words if word.startswith("--") and "=" in word)
    same = {"--data-dir": os.path.abspath(arguments.data_dir), "--job": os.path.abspath(arguments.job)}
    key, is_as_it_was = found.get("--key"), _job_line(arguments)[0] in text.splitlines()
    if key is None or not is_as_it_was or any(found.get(name) != value for name, value in same.items()):
        return None
    print(f"{arguments.output} keeps its key, and so its job; for another one give --key", file=sys.stderr)
    return key


def _job_line(arguments: argparse.Namespace) -> list[str]:
    """What the job file holds: under its key another job would be refused."""
    if not arguments.job:
        return []
    try:
        digest = hashlib.sha256(Path(arguments.job).read_bytes()).hexdigest()
    except OSError:  # it may be written later, so nothing is known to be the same
        digest = uuid.uuid4().hex
    return [f"# The job file when this was written: {digest}"]


_SCRIPT = r"""#!/bin/bash
{directives}
# Written by `gspo launch slurm`. What it starts, and where:
{plan}
# Ports can be moved from outside: they are those that follow.
set -euo pipefail
: {site_ports}
cd {project}
umask 077
export PYTHONPATH=$PWD TOKENIZERS_PARALLELISM=false
exec {python} -P -m services.launch.slurm_run --ports "{ports}" \
  {words}
"""
