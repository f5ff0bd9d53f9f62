"""``gspo profile``: where the time of a job goes, by process, and what to change first. It reads metrics.

Rule: numbers are medians over the steps looked at, and an advice follows from a share that is printed above it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from gspo_core.cli.connection import connected
from gspo_core.cli.terminal import say

Row = Mapping[str, float]

# The consecutive phases of a trainer's step, and of an episode.
OF_A_STEP = {
    "train": "trains",
    "wait": "waits for groups",
    "copy": "copies the weights",
    "behind": "waits for publishing",
}
OF_AN_EPISODE = {"engine": "the engine samples", "env": "the world acts", "queue": "it waits for either"}
BESIDE = ("time/publish_s", "time/engine_paused_s", "staleness/mean", "throughput/tokens_per_s")
NAMES = (
    *(f"time/{part}_s" for part in OF_A_STEP),
    *(f"time/episode_{part}_s" for part in OF_AN_EPISODE),
    *BESIDE,
)
# A share of the trainer's time that is worth an advice: below it, nothing but training would get faster.
MUCH = 0.15
BAR = 24


@dataclass(frozen=True)
class TimeShares:
    """Seconds, and what each share of them went to, the largest first."""

    seconds: float
    shares: Mapping[str, float]

    @classmethod
    def of(cls, rows: Sequence[Row], metric: str, parts: Mapping[str, str]) -> TimeShares | None:
        """``metric``: the name of a part's metric, with ``{}`` for the part. None if no row tells of any."""
        found = {part: _median(rows, metric.format(part)) for part in parts}
        told = {part: value for part, value in found.items() if value is not None}
        total = sum(told.values())
        if not total:
            return None
        largest_first = sorted(told, key=lambda part: -told[part])
        return cls(total, {part: told[part] / total for part in largest_first})

    def share(self, part: str) -> float:
        return self.shares.get(part, 0.0)


@dataclass(frozen=True)
class Profile:
    first: int
    last: int
    step: TimeShares
    episode: TimeShares | None
    beside: Mapping[str, float]
    """Medians of the metrics that are no part of a step's or an episode's time."""

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Profile | None:
        """None of a job that has no step, or none that says where its time went."""
        step = TimeShares.of(rows, "time/{}_s", OF_A_STEP)
        if step is None:
            return None
        beside = {name: value for name in BESIDE if (value := _median(rows, name)) is not None}
        episode = TimeShares.of(rows, "time/episode_{}_s", OF_AN_EPISODE)
        return cls(int(rows[0]["step"]), int(rows[-1]["step"]), step, episode, beside)


def show(url: str, job_id: str, *, num_steps: int, as_json: bool) -> int:
    with connected(url) as client:
        job = client.job(job_id)
        first = max(1, job["step"] - num_steps + 1)
        # All of them: to ask by name for one that no row has, as of a job without episodes of its own, is a mistake.
        rows = client.metrics(job_id, first)
    found = Profile.of([row for row in rows if any(name in row for name in NAMES)])
    if as_json:
        print(json.dumps(None if found is None else as_json_object(found)))
    elif found is None:
        say(
            f"{job_id} is {job['status']} and has no step that says where its time went; follow it: gspo watch {job_id}"
        )
    else:
        say(f"{job_id} is {job['status']}, step {job['step']} of {job['steps']}", "", *lines(found))
    return 0


def as_json_object(profile: Profile) -> dict[str, object]:
    parts = {"step": profile.step, "episode": profile.episode}
    return {
        "steps": [profile.first, profile.last],
        **{name: one and {"seconds": one.seconds, "shares": dict(one.shares)} for name, one in parts.items()},
        "beside": dict(profile.beside),
        "advice": advice(profile),
    }


def lines(profile: Profile) -> list[str]:
    of_steps = f"steps {profile.first} to {profile.last}" if profile.first < profile.last else f"step {profile.last}"
    return [
        f"a step takes the trainer {profile.step.seconds:.2f} s ({of_steps}, medians)",
        *_bars(profile.step, OF_A_STEP),
        *_of_episodes(profile.episode),
        *_of_beside(profile.beside),
        "",
        advice(profile),
    ]


def advice(profile: Profile) -> str:
    """The first thing to change, from the largest share that is not training itself."""
    waits, behind = profile.step.share("wait"), profile.step.share("behind")
    if max(waits, behind) < MUCH:
        return (
            f"Training itself binds: {profile.step.share('train'):.0%} of a step. More GPUs for the trainer, a larger"
            " learner.micro_batch_tokens that still fits (gspo plan), or fewer tokens a step make it faster; more"
            " engines do not."
        )
    if behind > waits:
        return (
            f"Handing weights on binds: {behind:.0%} of a step waits until the version before it is published. A faster"
            " disk, weights over a process group, or versions as differences make it faster (docs/engines.md)."
        )
    return f"Sampling binds: {waits:.0%} of a step waits for groups. {_of_sampling(profile.episode)}"


def _of_sampling(episode: TimeShares | None) -> str:
    if episode is None:
        return "Its episodes do not say where their time goes."
    part = next(iter(episode.shares))
    share = f"{episode.shares[part]:.0%} of an episode"
    if part == "engine":
        return f"The engines take {share}: more of them, or shorter answers, make it faster; more workers do not."
    if part == "env":
        return f"The worlds take {share}: quicker tools, or more hosts for them, make it faster; more engines do not."
    return (
        f"Waiting takes {share}: episodes stand before engines that switch or are away, or before hosts of worlds;"
        " gspo workers says which are there."
    )


def _bars(split: TimeShares, words: Mapping[str, str]) -> list[str]:
    width = max(map(len, words.values()))
    return [
        f"  {words[part]:<{width}}  {share:>4.0%}  {'█' * round(BAR * share):<{BAR}}  {share * split.seconds:.2f} s"
        for part, share in split.shares.items()
    ]


def _of_episodes(episode: TimeShares | None) -> list[str]:
    if episode is None:
        return []
    return ["", f"an episode takes {episode.seconds:.2f} s", *_bars(episode, OF_AN_EPISODE)]


def _of_beside(beside: Mapping[str, float]) -> list[str]:
    words = {
        "time/publish_s": "publishing a version takes {:.2f} s, beside the next step",
        "time/engine_paused_s": "engines pause {:.2f} s for it",
        "staleness/mean": "data are {:.2f} steps old when they are trained",
        "throughput/tokens_per_s": "{:,.0f} tokens are trained a second",
    }
    told = [words[name].format(value) for name, value in beside.items()]
    return ["", *told] if told else []


def _median(rows: Sequence[Row], name: str) -> float | None:
    values = [row[name] for row in rows if name in row]
    return median(values) if values else None
