"""A real Slurm on this machine: munge, slurmctld and a slurmd for each node, with files that stand in for GPUs.

Rule: everything it starts and writes is below one directory, and ends with the context. It needs root and what
``make real-slurm`` installs. No cgroups: Slurm accounts for CPUs, memory and GPUs and enforces none of them.
No accounts: it writes down whatever account is named, and asks no database about it.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from services.process.ports import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "squeue", "scancel")
START_S = 120.0
CPUS, MEMORY_MB = 64, 200_000


def is_installed() -> bool:
    return os.geteuid() == 0 and all(shutil.which(name) for name in PROGRAMS)


@dataclass(frozen=True)
class Node:
    """What can be asked for beside cores and memory."""

    gpus: int = 0
    gpu_type: str = ""
    feature: str = ""

    @property
    def gres(self) -> str:
        return ":".join(("gpu", *filter(None, (self.gpu_type,)), str(self.gpus))) if self.gpus else ""


class RealSlurm:
    def __init__(self, folder: Path, nodes: Sequence[Node]) -> None:
        self.folder = folder
        self.nodes = [f"n{number}" for number in range(len(nodes))]
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._configure(nodes)

    def _configure(self, nodes: Sequence[Node]) -> None:
        folder = self.folder
        for name in ("state", "spool", "gpus"):
            (folder / name).mkdir()
        for number in range(max(node.gpus for node in nodes)):
            # Slurm takes nothing but devices: these are further names of /dev/null.
            os.mknod(folder / "gpus" / f"gpu{number}", 0o600 | stat.S_IFCHR, os.stat("/dev/null").st_rdev)
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)
        lines = [
            "ClusterName=gspo",
            f"SlurmctldHost={os.uname().nodename}(127.0.0.1)",
            f"SlurmctldPort={free_port()}",
            *("SlurmUser=root", "SlurmdUser=root", "AuthType=auth/munge", "CredType=cred/munge"),
            f"AuthInfo=socket={folder}/munge.sock",
            f"StateSaveLocation={folder}/state",
            f"SlurmdSpoolDir={folder}/spool/%n",
            f"SlurmctldPidFile={folder}/ctld.pid",
            f"SlurmdPidFile={folder}/%n.pid",
            f"SlurmctldLogFile={folder}/ctld.log",
            f"SlurmdLogFile={folder}/%n.log",
            *("SlurmdParameters=config_overrides", "ProctrackType=proctrack/pgid", "TaskPlugin=task/none"),
            *("SelectType=select/cons_tres", "SelectTypeParameters=CR_Core_Memory", "DefMemPerCPU=1000"),
            *("MpiDefault=none", "ReturnToService=2", "SchedulerParameters=sched_interval=2,bf_interval=2"),
            *("PreemptType=preempt/partition_prio", "PreemptMode=REQUEUE", "KillWait=20", "UnkillableStepTimeout=120"),
            *("GresTypes=gpu", "MinJobAge=600", "JobRequeue=1"),
        ]
        for name, node in zip(self.nodes, nodes, strict=True):
            where = f"NodeName={name} NodeHostname={os.uname().nodename} NodeAddr=127.0.0.1 Port={free_port()}"
            more = (f"Gres={node.gres}" if node.gpus else "", f"Features={node.feature}" if node.feature else "")
            lines.append(" ".join((where, f"CPUs={CPUS} RealMemory={MEMORY_MB}", *filter(None, more))))
        every = ",".join(self.nodes)
        lines.append(f"PartitionName=low Nodes={every} Default=YES MaxTime=INFINITE State=UP PriorityTier=1")
        lines.append(f"PartitionName=high Nodes={every} MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF")
        (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
        devices = "".join(
            f"NodeName={name} Name=gpu{node.gpu_type and f' Type={node.gpu_type}'} File={folder}/gpus/gpu{number}\n"
            for name, node in zip(self.nodes, nodes, strict=True)
            for number in range(node.gpus)
        )
        (folder / "gres.conf").write_text(devices)

    def start(self) -> None:
        folder = self.folder
        sockets = [
            f"--socket={folder}/munge.sock",
            f"--pid-file={folder}/munged.pid",
            f"--log-file={folder}/munged.log",
        ]
        self._daemon("munged", "--foreground", "--force", f"--key-file={folder}/munge.key", *sockets)
        self._until(lambda: (folder / "munge.sock").exists(), "munged")
        self._daemon("slurmctld", "-D", "-c")
        for name in self.nodes:
            self._daemon("slurmd", "-D", "-N", name)
        self._until(lambda: sorted(self.run("sinfo", "-hNt", "idle", "-p", "low", "-o", "%N").split()) == self.nodes)

    def _daemon(self, *command: str) -> None:
        with (self.folder / f"{command[0]}.out").open("ab") as log:
            self._daemons.append(subprocess.Popen(command, env=self.environment, stdout=log, stderr=log))

    def _until(self, condition: Callable[[], bool], what: str = "slurm") -> None:
        deadline = time.monotonic() + START_S
        while not condition():
            assert time.monotonic() < deadline, (what, self.logs())
            time.sleep(0.2)

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-1000:] for path in sorted(self.folder.glob("*.log")))

    def run(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60, check=False)
        return done.stdout

    def submit(self, script: Path, output: Path, *options: str, settings: Mapping[str, str]) -> str:
        done = self._sbatch(f"--output={output}", *options, str(script), **settings)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def refusal(self, script: Path) -> str:
        """Why this Slurm does not take the script."""
        done = self._sbatch(str(script))
        assert done.returncode != 0, done.stdout
        return done.stderr

    def _sbatch(self, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
        environment = {**self.environment, **settings}
        command = ["sbatch", "--parsable", *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)

    def state(self, job: str) -> str:
        """Such as RUNNING, PENDING, COMPLETED."""
        return self.described("job", job)[0]["JobState"]

    def described(self, *what: str) -> list[dict[str, str]]:
        """What ``scontrol show`` says of each."""
        lines = self.run("scontrol", "--oneliner", "show", *what).splitlines()
        return [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in lines if line.strip()]

    def close(self) -> None:
        self.run("scancel", "--full", "--user=root")
        deadline = time.monotonic() + 60
        while self.run("squeue", "-h").strip() and time.monotonic() < deadline:
            time.sleep(0.5)
        for one in reversed(self._daemons):
            one.terminate()
        for one in reversed(self._daemons):
            try:
                one.wait(20)
            except subprocess.TimeoutExpired:
                one.kill()
                one.wait()


@contextmanager
def real_slurm(folder: Path, nodes: Sequence[Node] = (Node(),)) -> Iterator[RealSlurm]:
    slurm = RealSlurm(folder, nodes)
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.close()
