"""The options of ``gspo up`` and ``gspo launch PLACE`` that say how many processes there are, and what an engine is."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection, Iterable
from enum import Enum

from gspo_core.cli.command import CommandError
from gspo_core.idempotency_key import IN_WORDS, KEY
from services.launch import engine_command, engine_versions, topology
from services.launch.engine_command import BadEngineCommand, EngineCommand
from services.launch.engine_versions import NoVersion, Unanswered
from services.launch.placement import Member, PlacementError, PlacementRequest, parse_gpus
from services.launch.topology import ENGINE, Share, Site

NO_KEYED_VLLM = (
    "--vllm is for engines on loopback without a key: vLLM takes the calls that pause it and change its weights from "
    "whoever reaches its port, its own key does not guard them. Take --sglang, or for gspo up unset GSPO_ENGINE_KEYS"
)


class Where(Enum):
    """Where the Python of an engine is, seen from the command that asks for it."""

    HERE = "on this machine"
    PERHAPS_HERE = "on the machines of an allocation, of which this one need not be"
    IMAGE = "in an image"
    UNSEEN = "wherever it is: a plan starts none"


def add_counts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trainers", type=int, default=1, help="jobs that train at the same time (default: 1)")
    parser.add_argument("--engines", type=int, help="number of engines (default: one a GPU, or one a node)")
    parser.add_argument(
        "--gpus",
        nargs="+",
        action="extend",
        default=[],
        metavar="ROLE:GPUS",
        help="which GPUs are whose: trainer:0-3 engines:4-7, on several nodes trainer:0/0-7 engines:1-3/0-7",
    )
    parser.add_argument("--rollout-workers", type=int, default=1, help="rollout processes on each node (default: 1)")


def add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plan", action="store_true", help="print what would run where, and start nothing")


def add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sglang",
        nargs="?",
        const="",
        metavar="ARGS",
        help="sample with SGLang, given further arguments: --sglang='--mem-fraction-static 0.5'",
    )
    parser.add_argument(
        "--sglang-python", metavar="PYTHON", help="Python that has SGLang (default: .venv-sglang, or the one on PATH)"
    )
    parser.add_argument(
        "--vllm",
        nargs="?",
        const="",
        metavar="ARGS",
        help="sample with vLLM, given further arguments: --vllm='--gpu-memory-utilization 0.5' (gspo up only)",
    )
    parser.add_argument(
        "--vllm-python", metavar="PYTHON", help="Python that has vLLM (default: .venv-vllm, or the one on PATH)"
    )
    parser.add_argument(
        "--engine",
        metavar="COMMAND",
        help="sample with this engine; {model}, {host}, {port}, {gpus} and {config} (file of its keys) are filled in",
    )


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """What a batch system or a cluster wants to know."""
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--gpus-per-node", type=int, default=0)
    parser.add_argument("--trainer-nodes", type=int, help="nodes that train together (default: 1)")
    parser.add_argument(
        "--trainer-ranks",
        type=int,
        default=1,
        help="trainer ranks on each of them where there are no GPUs (default: 1)",
    )
    for option, form in (("--cpus", "N"), ("--memory", "SIZE")):
        parser.add_argument(
            option,
            nargs="+",
            action="extend",
            default=[],
            metavar=f"KIND={form}",
            help=f"for each process of a kind, or each of its GPUs: engine={'8' if form == 'N' else '64G'}",
        )


def add_whole(parser: argparse.ArgumentParser) -> None:
    """All options of an installation on a cluster."""
    parser.add_argument("--data-dir", required=True, help="directory that all nodes share")
    parser.add_argument("--model", required=True, help="model that the engines start with, on every node")
    parser.add_argument("--job", metavar="FILE", help="submit this job; all ends with it")
    said = "the job's idempotency key (default: a fresh one; of a Slurm script that is written again, its own)"
    parser.add_argument("--key", help=said)
    add_counts(parser)
    add_engine(parser)
    add_cluster(parser)


def model_of(arguments: argparse.Namespace) -> str:
    """A folder of where the command is typed holds wherever a process starts; any other word is for the engines."""
    model: str = arguments.model
    return os.path.abspath(model) if os.path.isdir(model) else model


def cluster_wanted(arguments: argparse.Namespace) -> PlacementRequest:
    """Raises CommandError."""
    if arguments.trainer_nodes is not None and arguments.gpus:
        raise CommandError("--gpus says on which nodes a trainer is, and --trainer-nodes too: leave one of the two out")
    try:
        return PlacementRequest(
            nodes=arguments.nodes,
            gpus_per_node=arguments.gpus_per_node,
            trainers=arguments.trainers,
            engines=arguments.engines,
            trainer_nodes=1 if arguments.trainer_nodes is None else arguments.trainer_nodes,
            trainer_ranks=arguments.trainer_ranks,
            rollout_workers=arguments.rollout_workers,
            gpus=parse_gpus(arguments.gpus),
            shares=_shares(arguments.cpus, arguments.memory),
        )
    except PlacementError as error:
        raise CommandError(str(error)) from error


def _shares(cpus: list[str], memory: list[str]) -> dict[str, Share]:
    """Raises PlacementError."""
    known = {one.name: one.share for one in topology.processes(Site.BATCH) if one.health is not None}
    wanted_cpus, wanted_memory = _by_kind(cpus, known, "--cpus"), _by_kind(memory, known, "--memory")
    return {
        kind: Share(
            int(wanted_cpus.get(kind, share.cpus)),
            megabytes(wanted_memory[kind]) if kind in wanted_memory else share.memory_mb,
        )
        for kind, share in known.items()
    }


def _by_kind(words: list[str], known: dict[str, Share], option: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in words:
        kind, _, value = word.partition("=")
        if kind not in known or not value[:1].isdecimal() or (option == "--cpus" and not value.isdecimal()):
            raise PlacementError(f"{option} {word}: say KIND=NUMBER, with KIND one of {', '.join(sorted(known))}")
        if not value.strip("0MGTmgt"):
            raise PlacementError(f"{option} {word}: a process needs some")
        if kind in found:
            raise PlacementError(f"{option} says twice what each {kind} has: {found[kind]} and {value}")
        found[kind] = value
    return found


def megabytes(text: str) -> int:
    """``64G`` or ``800M``, as Slurm writes it; a bare number is megabytes. Raises PlacementError."""
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "M")
    if not number.isdecimal() or unit not in "MGT":
        raise PlacementError(f"{text!r} is no amount of memory: say 800M, 64G or 1T")
    return int(number) * {"M": 1, "G": 1024, "T": 1024**2}[unit]


def check_engine(engine: EngineCommand | None, members: Iterable[Member]) -> None:
    """Raises PlacementError where the embedded engine would get GPUs that it does not use."""
    wide = [one for one in members if one.process is ENGINE and len(one.devices) > 1]
    if engine is None and wide:
        raise PlacementError(
            f"{wide[0].name} would have {len(wide[0].devices)} GPUs, and the embedded engine computes on one: drop "
            f"--engines, which gives each engine one, or take --sglang"
        )


def check_key(arguments: argparse.Namespace) -> None:
    """Raises CommandError."""
    if arguments.key is not None and not arguments.job:
        raise CommandError("--key is the key of a job, and there is none: give it with --job, or with gspo submit")
    if arguments.key is not None and not KEY.fullmatch(arguments.key):
        raise CommandError(f"--key {arguments.key!r}: {IN_WORDS}")


def check_kind(arguments: argparse.Namespace, *, has_keys: bool) -> None:
    """Raises CommandError for a kind of engine that is known and cannot be had."""
    if arguments.vllm is not None and has_keys:
        raise CommandError(NO_KEYED_VLLM)


def chosen_engine(
    arguments: argparse.Namespace,
    *,
    on_gpu: bool,
    has_keys: bool,
    filled: Collection[str] = engine_command.FILLED,
    where: Where = Where.HERE,
) -> EngineCommand | None:
    """None for the embedded engine. ``filled``: the words in braces of which the launcher knows the value.

    An SGLang of this machine that cannot sample for a training is refused. Raises CommandError.
    """
    check_kind(arguments, has_keys=has_keys)
    kinds = [f"--{name}" for name in ("sglang", "vllm", "engine") if getattr(arguments, name) is not None]
    if len(kinds) > 1:
        raise CommandError(f"{kinds[0]} and {kinds[1]} both say what an engine is: give one of them")
    for option, name in (("sglang", "SGLang"), ("vllm", "vLLM")):
        if getattr(arguments, f"{option}_python") is not None and getattr(arguments, option) is None:
            raise CommandError(f"--{option}-python says where {name} is, and only --{option} starts it: give both")
    try:
        if arguments.engine is not None:
            return engine_command.given(arguments.engine, filled=filled)
        if arguments.vllm is not None:
            return _vllm(arguments, on_gpu=on_gpu)
        if arguments.sglang is None:
            return None
        return _sglang(arguments, on_gpu=on_gpu, has_keys=has_keys, where=where)
    except BadEngineCommand as error:
        raise CommandError(str(error)) from error


def _sglang(arguments: argparse.Namespace, *, on_gpu: bool, has_keys: bool, where: Where) -> EngineCommand:
    """Raises CommandError, BadEngineCommand."""
    further = engine_command.further_words("--sglang", arguments.sglang)
    python = sglang_python(arguments, where)
    return engine_command.sglang(further, python=python, on_gpu=on_gpu, has_keys=has_keys)


def sglang_python(arguments: argparse.Namespace, where: Where) -> str:
    """Raises CommandError if it is to be here and is not, or if what is here is too old or has none."""
    named: str | None = arguments.sglang_python
    if where is Where.UNSEEN:
        return named or "python"
    if where is Where.IMAGE:
        if not named:
            raise CommandError(
                "--sglang in the image of --container: name its Python that has SGLang, such as --sglang-python python3"
            )
        return named
    found = engine_command.find_sglang(named)
    if where is Where.PERHAPS_HERE and named and found is None:
        return named
    if found is None:
        raise _without_python("sglang", "SGLang", named)
    try:
        version = engine_versions.sglang_version(found)
    except NoVersion as error:
        if where is Where.PERHAPS_HERE:  # the same path may be another Python there
            print(f"--sglang: {found} {error} here: the script refuses if that is so there too", file=sys.stderr)
            return found
        raise CommandError(
            f"--sglang: {found} {error}: install SGLang there, or name another Python with --sglang-python"
        ) from None
    except Unanswered as error:
        print(f"--sglang: {found} {error}, so its version is unknown", file=sys.stderr)
        return found
    if told := engine_versions.sglang_problem(version):
        raise CommandError(
            f"--sglang: version {version} in {found} {told} there, or name another Python with --sglang-python"
        )
    return found


def _vllm(arguments: argparse.Namespace, *, on_gpu: bool) -> EngineCommand:
    """Raises CommandError, BadEngineCommand."""
    further = engine_command.further_words("--vllm", arguments.vllm)
    python = engine_command.find_vllm(arguments.vllm_python)
    if python is None:
        raise _without_python("vllm", "vLLM", arguments.vllm_python)
    return engine_command.vllm(further, python=python, on_gpu=on_gpu)


def _without_python(option: str, name: str, given: str | None) -> CommandError:
    found = f"{given} is not there" if given else "none was found"
    return CommandError(
        f"--{option} needs a Python that has {name}, and {found}: install {name} into a virtual environment of its "
        f"own and name that one's Python with --{option}-python (on a CPU, make {option}-cpu does it)"
    )
