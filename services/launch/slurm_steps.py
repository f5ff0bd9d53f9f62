"""Members of an installation as steps of a Slurm allocation.

Rule: a member is asked to leave by a signal to its step. ``srun`` passes no signal on: it answers SIGTERM by killing
its task. Slurm gives each step CPUs, memory and GPUs of its own out of the allocation, and so chooses which of a node's
GPUs these are. Runs where the batch script runs.
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import time
from collections.abc import Mapping, Sequence

from gspo_core.cli.command import CommandError
from services.files.data_dir import DataDir
from services.launch.placement import Member
from services.process.children import die_with_parent

# What the allocation asked for; a step asks for its own part.
_OF_THE_ALLOCATION = ("SLURM_GPUS", "SLURM_GRES", "SLURM_MEM", "SLURM_CPUS_PER_TASK", "SLURM_NTASKS", "SLURM_TRES_PER")
COMMAND_S = 10.0
# While nothing is known of the step of a member that is to leave.
ASK_AGAIN_S = 2.0
LISTED_S = 0.5


class SlurmSteps:
    def __init__(self, nodes: Sequence[str], data_dir: DataDir, more: Sequence[str] = ()) -> None:
        """``nodes``: their names in Slurm. ``more``: further options of ``srun``."""
        self._nodes = nodes
        self._data_dir = data_dir
        self._more = more
        self._listed = _ListedSteps()

    def start(self, member: Member, command: Sequence[str], environment: Mapping[str, str]) -> SlurmStep:
        argv = [
            "srun",
            f"--job-name={member.name}",
            f"--nodelist={self._nodes[member.node]}",
            *("--nodes=1", "--ntasks=1", "--exact", "--mpi=none", "--input=none", "--open-mode=append"),
            "--export=ALL",  # a site, or the allocation, may export nothing
            f"--cpus-per-task={member.cpus}",
            f"--mem={member.memory_mb}M",
            f"--gres=gpu:{len(member.devices)}" if member.devices else "--gres=none",
            f"--output={self._data_dir.log_of(member.name)}",
            *self._more,
            *command,
        ]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(_OF_THE_ALLOCATION)}
        srun = subprocess.Popen(
            argv,
            env={**inherited, **environment},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
        return SlurmStep(member.name, srun, self._listed)


class _NotKnown(Exception):
    """Slurm does not say which steps run, or refuses to signal one."""


class _ListedSteps:
    """The steps that run, asked for once for all members that are looked after at the same time."""

    def __init__(self) -> None:
        self._found: dict[str, str] | _NotKnown = {}
        self._until = -math.inf

    def number(self, name: str) -> str | None:
        """``JOB.STEP``; None if it does not run. Raises ``_NotKnown``."""
        if time.monotonic() >= self._until:
            self._found = self._asked()
            self._until = time.monotonic() + (ASK_AGAIN_S if isinstance(self._found, _NotKnown) else LISTED_S)
        if isinstance(self._found, _NotKnown):
            raise self._found
        return self._found.get(name)

    def _asked(self) -> dict[str, str] | _NotKnown:
        command = ["squeue", "--steps", f"--jobs={os.environ['SLURM_JOB_ID']}", "--noheader", "--format=%i|%j"]
        try:
            listed = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            return _NotKnown(str(error))
        steps = [line.strip().split("|", 1) for line in listed.stdout.splitlines() if "|" in line]
        return {name: number for number, name in reversed(steps)}


class SlurmStep:
    def __init__(self, name: str, srun: subprocess.Popen[bytes], listed: _ListedSteps) -> None:
        self._name = name
        self._srun = srun
        self._listed = listed
        self._ask_again_at: float | None = None
        """When it is asked to leave once more, since Slurm did not say whether there is a step to signal."""

    def poll(self) -> int | None:
        code = self._srun.poll()
        if code is None and self._ask_again_at is not None and time.monotonic() >= self._ask_again_at:
            self.ask_to_leave()
        return code

    def ask_to_leave(self) -> None:
        """While nothing is known of its step, ``poll`` asks again: ``srun`` would kill a task that runs."""
        try:
            is_begun = self._signal("TERM")
        except _NotKnown:
            self._ask_again_at = time.monotonic() + ASK_AGAIN_S
            return
        self._ask_again_at = None
        if not is_begun:
            self._srun.terminate()

    def kill(self) -> None:
        self._ask_again_at = None
        with contextlib.suppress(_NotKnown):
            self._signal("KILL")
        self._srun.kill()
        self._srun.wait()

    def _signal(self, name: str) -> bool:
        """Whether there was a step to signal. By way of the controller: else Slurm 22.05 reports an error in a larger
        allocation, after it has signalled more than once. Raises ``_NotKnown``."""
        if (step := self._listed.number(self._name)) is None:
            return False
        command = ["scancel", "--ctld", f"--signal={name}", step]
        # One that takes too long may have signalled, and a second signal would be one for haste.
        with contextlib.suppress(subprocess.TimeoutExpired):
            try:
                subprocess.run(command, timeout=COMMAND_S, check=True, stdin=subprocess.DEVNULL)
            except (OSError, subprocess.CalledProcessError) as error:  # refused, or the step has ended just now
                raise _NotKnown(str(error)) from None
        return True


def node_names() -> list[str]:
    """The nodes of the allocation that we run in. Raises CommandError."""
    if not (nodes := os.environ.get("SLURM_JOB_NODELIST")):
        raise CommandError(
            "this is no allocation of Slurm (SLURM_JOB_NODELIST is not set): submit the script to sbatch"
        )
    return _asked("hostnames", nodes).split()


def check_log_path(data_dir: str) -> None:
    """Raises CommandError for what ``srun --output`` does not take as it is: it knows no ``%%``."""
    if found := next((letter for letter in "%\\" if letter in data_dir), None):
        raise CommandError(
            f"--data-dir {data_dir!r} has a {found}, which srun replaces in the names of logs: rename it"
        )


def addresses(nodes: Sequence[str]) -> list[str]:
    """Under which Slurm itself reaches each node: its name alone may mean nothing on another machine.

    Raises CommandError.
    """
    found = []
    for node in nodes:
        fields = dict(word.split("=", 1) for word in _asked("node", node, "--oneliner").split() if "=" in word)
        found.append(fields.get("NodeAddr", node))
    return found


def _asked(what: str, name: str, *options: str) -> str:
    """Raises CommandError."""
    command = ["scontrol", "show", what, name, *options]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=COMMAND_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CommandError(f"Slurm does not say what its nodes are: {error}") from None
    if done.returncode != 0:
        raise CommandError(f"{' '.join(command)} failed: {done.stderr.strip() or f'status {done.returncode}'}")
    return done.stdout
