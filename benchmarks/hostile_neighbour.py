"""What does an honest job lose beside one whose world takes memory, processes, disk and processors without end?

    python -m benchmarks.hostile_neighbour MODEL [--seconds 40] [--rounds 5]

The real local stack: two trainers, two embedded engines, one worker, environments behind the wall. Job A trains with
the calculator; job B is held, or behaves (its world waits), or is hostile (its world, `hostile_world`, takes all
it can for just as long). A file switches the world, so that all sides of a round are the same processes; each begins
with another. Counted are job A's steps for each CPU second of its trainer and its engine, between two of its steps,
and for each second of the clock; then the CPU of all services for each step, which shows what the worker pays for B's
deaths. MODEL is the demo's (it is made where it is not yet).
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks import hostile_world
from examples.demo.demo import NO_KEYS
from examples.demo.model import make_demo_model
from gspo_core import descendants
from gspo_core.client import Client
from gspo_core.json_value import JSON
from services.hosts.walls import control_groups
from services.launch.stack import Stack, StackConfig

RESULTS = Path(__file__).with_name("results")
MOST_LOST = 0.10
SETTLE_S = 2 * hostile_world.LASTS_S
"""For what the side before began to end."""
FIRST_STEPS = 3
STARTS_WITHIN_S = 300.0
POLL_S = 0.1
TICKS = os.sysconf("SC_CLK_TCK")
SERVICES = ("services.api", "services.trainer", "services.engine", "services.rollout", "services.gateway", "-server")

HELD, BEHAVING, HOSTILE = "held", "behaving", "hostile"
SIDES = (HELD, BEHAVING, HOSTILE)

PAGE = """# An honest job beside a hostile world

Written by `python -m benchmarks.hostile_neighbour MODEL --seconds {seconds:g} --rounds {rounds}`. {machine};
control groups: {groups}. Job A trains with the calculator on the real local stack. Job B
is held, or behaves (its world waits), or is hostile (its world takes memory, processes, disk and processors). A CPU
second is one of A's trainer and engine; "all" counts those of every service of the stack for each step of A. Load is
the machine's, at the end of each side. Each cell is B held, behaving, hostile.

| round | steps a CPU second | steps a second | CPU s of all a step | load |
|---:|---:|---:|---:|---:|
{rows}

| median of {rounds} (least, most) | steps a CPU second | steps a second |
|---|---:|---:|
{changes}

The aim, less than {aim:.0%} of A's steps a CPU second lost to a hostile world, is {beside} beside the same job that
behaves, and {alone} beside none. Job B meanwhile: {ends}.
"""


@dataclass(frozen=True)
class Look:
    """What was taken up to a step of job A."""

    at_s: float
    step: int
    own_s: float
    services_s: float


@dataclass(frozen=True)
class Side:
    steps_per_cpu_s: float
    steps_per_s: float
    services_s_per_step: float
    load: float


class Victim:
    """Job A and its processes."""

    def __init__(self, api_url: str, job: str) -> None:
        self._api_url, self._job = api_url, job
        self._pids: list[int] = []
        self.looks: list[Look] = []
        threading.Thread(target=self._look_on, name="steps", daemon=True).start()

    def wait_for(self, num_looks: int) -> None:
        deadline = time.monotonic() + STARTS_WITHIN_S
        while len(self.looks) < num_looks:
            if time.monotonic() > deadline:
                raise SystemExit(f"{self._job} took no {num_looks} steps within {STARTS_WITHIN_S:.0f} s")
            time.sleep(POLL_S)

    def settle(self) -> None:
        """Its trainer and its engine are those that have worked so far: it is alone yet."""
        for module in ("services.trainer.attempt_main", "services.engine"):
            mine = [pid for pid, command in commands().items() if module in command]
            self._pids.append(max(mine, key=cpu_seconds))
        self.looks.clear()

    def measure(self, seconds: float) -> Side:
        time.sleep(SETTLE_S)
        begin = time.monotonic()
        time.sleep(seconds)
        inside = [one for one in self.looks if one.at_s >= begin]
        first, last = inside[0], inside[-1]
        steps = last.step - first.step
        return Side(
            steps / (last.own_s - first.own_s),
            steps / (last.at_s - first.at_s),
            (last.services_s - first.services_s) / steps,
            os.getloadavg()[0],
        )

    def _look_on(self) -> None:
        with Client(self._api_url) as client:
            for event in client.events(self._job, after="0"):
                if event.type == "step":
                    own = sum(map(cpu_seconds, self._pids))
                    everyone = sum(cpu_seconds(pid) for pid, text in commands().items() if is_service(text))
                    self.looks.append(Look(time.monotonic(), int(str(event.data["step"])), own, everyone))


class Neighbour:
    """Job B, submitted again whenever it is over."""

    def __init__(self, client: Client, spec: Mapping[str, JSON]) -> None:
        self._client, self._spec = client, spec
        self._job = client.create_job(spec)["id"]
        self.ends: list[str] = []

    def look_after(self) -> None:
        job = self._client.job(self._job)
        if job["status"] in ("failed", "succeeded", "cancelled"):
            reason = job["status_reason"]
            self.ends.append(f"{job['status']} at step {job['step']} ({reason['code'] if reason else 'no reason'})")
            self._job = self._client.create_job(self._spec)["id"]

    def hold(self, is_held: bool) -> None:
        if is_held:
            self._client.pause(self._job)
        elif self._client.job(self._job)["status"] in ("pausing", "paused"):
            self._client.resume(self._job)

    def told(self) -> str:
        job = self._client.job(self._job)
        here = f"{job['status']} at step {job['step']}"
        return "; ".join([*self.ends, here])


def commands() -> dict[int, str]:
    """Of everything that comes from this process."""
    parents, mine, more = descendants.parents(), {os.getpid()}, True
    while more:
        found = {pid for pid, parent in parents.items() if parent in mine} - mine
        mine, more = mine | found, bool(found)
    return {pid: _command(pid) for pid in mine - {os.getpid()}}


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    except OSError:
        return ""


def is_service(command: str) -> bool:
    return any(name in command for name in SERVICES) and "services.hosts" not in command


def cpu_seconds(pid: int) -> float:
    """Of a process itself, all threads."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS


def job(model: Path, environment: dict[str, JSON], **more: JSON) -> dict[str, JSON]:
    return {
        "model": str(model),
        "environments": [environment],
        "rollout": {"group_size": 4, "max_staleness": 2},
        "sampling": {"max_new_tokens": 64},
        "limits": {"max_turns": 4, "max_context_tokens": 512},
        "optimizer": {"lr": 1e-7},  # what is sampled stays alike from the first round to the last
        "steps": 100_000,
        "seed": 1,
        **more,
    }


def measure(model: Path, seconds: float, num_rounds: int, work: Path) -> str:
    make_demo_model(model)
    switch = work / "switch" / "on"
    switch.parent.mkdir()
    settings = {**NO_KEYS, "GSPO_ENV_TIER": "wall", "GSPO_ENV_READABLE": str(switch.parent)}
    config = StackConfig(work / "data", model, port=0, trainers=2, engines=2, threads=1, environment=settings)
    rounds: list[dict[str, Side]] = []
    with Stack(config) as stack, Client(stack.api_url) as client:
        calculator: dict[str, JSON] = {"ref": "environments.calculator:Calculator"}
        first = client.create_job(job(model, calculator, name="honest", groups_per_step=4))
        victim = Victim(stack.api_url, first["id"])
        victim.wait_for(FIRST_STEPS)
        victim.settle()
        greedy: dict[str, JSON] = {"ref": "benchmarks.hostile_world:Greedy", "config": {"switch": str(switch)}}
        neighbour = Neighbour(client, job(model, greedy, name="hostile", groups_per_step=1))
        for number in range(num_rounds):
            sides: dict[str, Side] = {}
            for place in range(len(SIDES)):
                side = SIDES[(number + place) % len(SIDES)]
                switch.touch() if side == HOSTILE else switch.unlink(missing_ok=True)
                neighbour.hold(side == HELD)
                sides[side] = victim.measure(seconds)
                neighbour.look_after()
            rounds.append(sides)
            print(number, sides, neighbour.told(), flush=True)
        return page(rounds, seconds, neighbour.told())


def page(rounds: list[dict[str, Side]], seconds: float, ends: str) -> str:
    bounded, missing = control_groups.offer()
    compared = ((BEHAVING, HELD), (HOSTILE, BEHAVING), (HOSTILE, HELD))
    lost = {pair: -median(changes(rounds, "steps_per_cpu_s", *pair)) for pair in compared}
    return PAGE.format(
        seconds=seconds,
        rounds=len(rounds),
        machine=f"Linux {platform.release()}, {os.cpu_count()} cores",
        groups=bounded or f"none ({missing})",
        rows="\n".join(row(number, sides) for number, sides in enumerate(rounds)),
        changes="\n".join(
            f"| {one} against {other} | {spread(rounds, 'steps_per_cpu_s', one, other)} "
            f"| {spread(rounds, 'steps_per_s', one, other)} |"
            for one, other in compared
        ),
        aim=MOST_LOST,
        beside=verdict(lost[HOSTILE, BEHAVING]),
        alone=verdict(lost[HOSTILE, HELD]),
        ends=ends,
    )


def row(number: int, sides: Mapping[str, Side]) -> str:
    kept = [sides[name] for name in SIDES]
    cells = (
        f"{number}",
        ", ".join(f"{side.steps_per_cpu_s:.3f}" for side in kept),
        ", ".join(f"{side.steps_per_s:.2f}" for side in kept),
        ", ".join(f"{side.services_s_per_step:.2f}" for side in kept),
        ", ".join(f"{side.load:.1f}" for side in kept),
    )
    return f"| {' | '.join(cells)} |"


def changes(rounds: list[dict[str, Side]], figure: str, one: str, other: str) -> list[float]:
    """By round, what ``one`` side has more of ``figure`` than ``other``, as a share."""
    return [getattr(sides[one], figure) / getattr(sides[other], figure) - 1 for sides in rounds]


def spread(rounds: list[dict[str, Side]], figure: str, one: str, other: str) -> str:
    found = changes(rounds, figure, one, other)
    return f"{median(found):+.1%} ({min(found):+.1%}, {max(found):+.1%})"


def verdict(lost: float) -> str:
    return f"kept ({lost:.1%})" if lost < MOST_LOST else f"missed ({lost:.1%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="folder of the demo's model")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each side of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--page", type=Path, default=RESULTS / "hostile_neighbour.md", help="where the result is written"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text = measure(given.model.absolute(), given.seconds, given.rounds, Path(folder))
    given.page.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
