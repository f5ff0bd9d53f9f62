"""What an evaluation found: as numbers for programs, and as lines for people.

Rule: what failed is counted apart, with its reason, and enters no mean. Nothing is shown that was not counted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from gspo_core.evaluation.comparison import PolicyDifference, difference
from gspo_core.evaluation.evaluation import EvalSetting
from gspo_core.evaluation.intervals import MeanScore, score
from gspo_core.evaluation.played import Played
from gspo_core.json_value import JSON

_REASON_CHARS = 200


@dataclass(frozen=True)
class EvalReport:
    """One policy's episodes."""

    setting: EvalSetting
    episodes: Sequence[Played]

    @property
    def reward(self) -> MeanScore | None:
        return score(list(self.rewards().values()))

    @property
    def num_failed(self) -> int:
        return sum(one.reward is None for one in self.episodes)

    def rewards(self) -> dict[int, list[float]]:
        """By task."""
        return by_task(self.episodes, lambda one: one.reward)

    def parts(self) -> dict[str, MeanScore]:
        return self._named("parts")

    def metrics(self) -> dict[str, MeanScore]:
        return self._named("metrics")

    def stops(self) -> dict[str, int]:
        return dict(Counter(one.stop for one in self.episodes if one.reward is not None).most_common())

    def failures(self) -> dict[str, int]:
        return dict(Counter((one.failure or "")[:_REASON_CHARS] for one in self.episodes if one.reward is None))

    def mean(self, count: Callable[[Played], int | None]) -> float | None:
        """Over the episodes that have it."""
        found = [number for one in self.episodes if one.reward is not None and (number := count(one)) is not None]
        return sum(found) / len(found) if found else None

    def to_json(self) -> dict[str, JSON]:
        reward = self.reward
        parts: dict[str, JSON] = {name: one.to_json() for name, one in self.parts().items()}
        metrics: dict[str, JSON] = {name: one.to_json() for name, one in self.metrics().items()}
        return {
            "model": self.setting.model,
            "environment": self.setting.environment,
            "split": self.setting.split,
            "tasks": len(self.setting.tasks),
            "samples": self.setting.samples,
            "seed": self.setting.seed,
            "episodes": len(self.episodes),
            "failed": self.num_failed,
            "reward": None if reward is None else reward.to_json(),
            "parts": parts,
            "metrics": metrics,
            "stops": dict(self.stops()),
            "failures": dict(self.failures()),
            "turns_mean": self.mean(lambda one: one.num_turns),
            "tokens_mean": self.mean(lambda one: one.num_tokens),
            "calls_mean": self.mean(lambda one: one.num_calls),
            "parse_errors_mean": self.mean(lambda one: one.num_parse_errors),
        }

    def lines(self) -> Iterator[str]:
        setting = self.setting
        split = "held-out" if setting.split == "eval" else "training"
        yield f"{setting.model} in {setting.environment}"
        yield f"  episodes     {len(setting.tasks)} {split} tasks, {setting.samples} each, seed {setting.seed}"
        reward = self.reward
        yield f"  {'success' if reward and reward.is_share else 'reward':12} {_scored(reward)}"
        yield from (f"  {name:12} {_scored(one)}" for name, one in self.parts().items())
        yield from (f"  {name:12} {_bounded(one, '.4g')}" for name, one in self.metrics().items())  # may be counts
        yield f"  stopped by   {_counted(self.stops()) or 'nothing'}"
        if means := ", ".join(self._means()):
            yield f"  an episode   {means}"
        if self.num_failed:
            yield f"  failed       {self.num_failed} of {len(self.episodes)}, which enter no number above"
            yield from (f"    {count} x {reason}" for reason, count in self.failures().items())

    def _means(self) -> Iterator[str]:
        counts: dict[str, Callable[[Played], int | None]] = {
            "turns": lambda one: one.num_turns,
            "sampled tokens": lambda one: one.num_tokens,
            "calls": lambda one: one.num_calls,
            "unreadable turns": lambda one: one.num_parse_errors,
        }
        for name, count in counts.items():
            if (mean := self.mean(count)) is not None:
                yield f"{mean:.3g} {name}"

    def _named(self, kind: str) -> dict[str, MeanScore]:
        names = sorted({name for one in self.episodes for name in getattr(one, kind)})
        found = {name: score(list(by_task(self.episodes, _getter(kind, name)).values())) for name in names}
        return {name: one for name, one in found.items() if one is not None}


def by_task(episodes: Iterable[Played], value: Callable[[Played], float | None]) -> dict[int, list[float]]:
    found: defaultdict[int, list[float]] = defaultdict(list)
    for one in episodes:
        if (number := value(one)) is not None:
            found[one.place.task].append(number)
    return dict(found)


def compare(ours: EvalReport, theirs: EvalReport) -> PolicyDifference | None:
    return difference(ours.rewards(), theirs.rewards())


def difference_lines(found: PolicyDifference | None, ours: str, theirs: str) -> Iterator[str]:
    yield f"{ours} against {theirs}"
    if found is None:
        yield "  no task on which both have a reward"
        return
    scale, unit = (100.0, " points") if found.is_share else (1.0, "")
    low, high = found.low, found.high
    bounds = "" if low is None or high is None else f" ({scale * low:+.3g} to {scale * high:+.3g})"
    yield f"  difference   {scale * found.mean:+.3g}{unit}{bounds}, p = {found.p_value:.2g}"
    equal = found.num_tasks - found.num_better - found.num_worse
    yield f"  tasks        {found.num_better} better, {found.num_worse} worse, {equal} alike"


def _getter(kind: str, name: str) -> Callable[[Played], float | None]:
    def get(one: Played) -> float | None:
        value: float | None = getattr(one, kind).get(name) if one.reward is not None else None
        return value

    return get


def _scored(found: MeanScore | None) -> str:
    if found is None:
        return "no episode has one"
    return _bounded(found, ".1f", 100.0, " %") if found.is_share else _bounded(found, ".4g")


def _bounded(found: MeanScore, form: str, scale: float = 1.0, unit: str = "") -> str:
    mean = f"{scale * found.mean:{form}}{unit}"
    if found.low is None or found.high is None:
        return mean
    return f"{mean} ({scale * found.low:{form}} to {scale * found.high:{form}})"


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())
