"""A history that was made up, sound, for tests to spoil: the second epoch of a job goes on from step 2 of the first,
which had logged a third step that is void; the third died before it trained anything, and the fourth ends it.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.chaos.evidence import JobEvidence, Version

STEPS = 4
GROUP_SIZE = 1
SETTINGS = {"version": 0, "values": {}}


def batch(groups: list[int], *, dropped: dict[str, list[int]], num_dispatched: int, ages: dict[str, int]) -> Any:
    extra = {"dropped": dropped, "num_dispatched": num_dispatched, "staleness": ages, "settings": dict(SETTINGS)}
    versions = [int(number) for number in ages]
    made = [_group(number, versions[place % len(versions)]) for place, number in enumerate(groups)]
    made[-1].trajectories[0].segments.extend(_piece(version) for version in versions)
    return SimpleNamespace(groups=made, extra=extra)


def _group(number: int, version: int) -> Any:
    episode = SimpleNamespace(key=f"job:{number}:0", segments=[_piece(version)])
    return SimpleNamespace(group=number, size=GROUP_SIZE, trajectories=[episode])


def _piece(version: int) -> Any:
    return SimpleNamespace(version=version, num_actions=1)


class MadeUp(JobEvidence):
    def __init__(self, directory: Path = Path("nowhere")) -> None:
        self.id = "job"
        self.directory = directory
        self.acts, self.hits = [], []
        rollout = SimpleNamespace(on_stale="drop", staleness_cap=1, max_staleness=1)
        self.spec = SimpleNamespace(steps=STEPS, groups_per_step=2, rollout=rollout)  # type: ignore[assignment]
        given: dict[str, Any] = self.__dict__
        given["status"] = {"status": "succeeded"}
        given["forks"] = {1: (0, 0), 2: (1, 2), 3: (2, 3), 4: (2, 3)}
        given["logged"] = {(1, 1), (1, 2), (1, 3), (2, 3), (4, 4)}
        given["batches"] = {
            (1, 1): batch([0, 1], dropped={}, num_dispatched=4, ages={"0": 0}),
            (1, 2): batch([2, 3], dropped={}, num_dispatched=6, ages={"0": 1, "1": 0}),
            (2, 3): batch([4, 6], dropped={"dropped_stale": [5]}, num_dispatched=9, ages={"1": 1, "2": 0}),
            (4, 4): batch([7, 8], dropped={}, num_dispatched=9, ages={"4": 0, "5": 0}),
        }
        places = {0: (1, 0), 1: (1, 1), 2: (1, 2), 3: (2, 2), 4: (2, 3), 5: (3, 3), 6: (4, 3), 7: (4, 4)}
        given["versions"] = {
            number: Version(number, place, {"model.safetensors": f"w{place[1]}"}) for number, place in places.items()
        }
