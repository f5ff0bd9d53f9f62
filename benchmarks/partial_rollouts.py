"""What partial rollouts are worth: `python -m benchmarks.partial_rollouts` (two minutes of CPU time).

Four ways to feed a trainer, on one simulated token clock, with the same lengths of the same episodes: a synchronous
batch; one batch ahead without partial rollouts; APRIL's shape (twice the groups, the first ones to end are trained, the
others go on in the next step); and this system's admission at its default. Which groups may be started, which are
trained and how old a token is decide the system's own functions (`gspo_core.staleness`). What is modelled is the
engine: slots, and a total speed that depends on how many are taken.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

import numpy as np

from benchmarks.simulator import Lengths
from gspo_core.position import Position
from gspo_core.staleness import OpenGroup, choose_groups, groups_admissible, token_staleness

RESULTS = Path(__file__).with_name("results") / "partial_rollouts.md"
GROUPS_PER_STEP, GROUP_SIZE = 8, 8
BATCH = GROUPS_PER_STEP * GROUP_SIZE
SLOT_TOKENS_PER_S = 40.0
STEPS, WARMUP, SEEDS = 60, 15, 3
MEDIAN, LIMIT = 2000.0, 16_000.0
TAILS = (3.0, 10.0, 33.0)
# Requests at which an engine of 64 slots has half of its speed. 13: fitted to a real SGLang on a CPU (194, 838, 1,593
# and 1,835 tokens/s at 1, 8, 32 and 64 requests).
ENGINES = {"linear": math.inf, "saturating": 13.0}
NO_CAP = 10**6

PAGE = """# Partial rollouts beside whole batches

Written by `python -m benchmarks.partial_rollouts`; simulated, so it is the same on every machine. {groups} groups of
{size} episodes a step; lengths log-normal with median {median:,.0f} tokens, cut at {limit:,.0f}; {batch} slots of
{rate:g} tokens/s for every way of working; {steps} steps, the first {warmup} not counted, {seeds} seeds with the same
lengths for all ways. Ratios are means over the seeds of the ratio to the synchronous batch of the same seed.

- **synchronous**: a batch is sampled, then trained; engine and trainer wait for each other.
- **one step off**: a batch is sampled while the one before is trained; whole batches, new weights between them only.
- **APRIL**: 2 x {batch} episodes are under way, sampling stops when {groups} groups have ended and goes on after the
  step, with the tokens that are there; engine and trainer take turns, as in APRIL.
- **ours, 1** and **ours, 4**: `max_staleness` 1 (as many groups as APRIL) and 4 (the default); sampling never stops,
  and episodes go on under new weights in the middle of a turn.

Engine: `linear` has a speed for each slot (a GPU that waits for memory); `saturating` is faster for each request when
fewer run: half of its total speed at 13 requests, fitted to a real SGLang.

## Sampling alone (training takes no time: what APRIL measures)

{alone}

## Training takes as long as sampling a batch in full slots

{both}

## How old what is trained was (training as long as sampling, p99/p50 = 10, linear)

{ages}

## Beside what others say

{reading}
"""


NOT_MODELLED = """- Not modelled: prefill (what a resumed episode costs without its prefix cache), the time in which
  weights are sent, environments, and that a synchronous system may lend the trainer's machines to sampling. The
  synchronous batch has as many slots as episodes. Claims of others were made on other machines with other lengths; they
  stand here for their size only. Nothing is said about learning from older tokens."""


@dataclass(frozen=True)
class Way:
    """How sampling and training follow each other."""

    name: str
    max_staleness: int = 0
    takes_turns: bool = False
    """Nothing is sampled while a step is trained."""
    whole: bool = False
    """A batch is begun when the one before has ended, and weights change between batches only."""


WAYS = (
    Way("synchronous", takes_turns=True),
    Way("one step off", 1, whole=True),
    Way("APRIL", 1, takes_turns=True),
    Way("ours, 1", 1),
    Way("ours, 4", 4),
)


@dataclass(frozen=True)
class Machine:
    half: float
    train_s: float

    def speed(self, num_running: int) -> float:
        """Tokens per second of each of them."""
        if math.isinf(self.half):
            return SLOT_TOKENS_PER_S
        return SLOT_TOKENS_PER_S * (BATCH + self.half) / (num_running + self.half)


@dataclass(eq=False)
class Episode:
    group: int
    left: float
    spans: list[tuple[int, float]] = field(default_factory=list)
    """Versions and how many tokens each sampled."""


@dataclass(eq=False)
class Run:
    """One way of working, from the first step to the last."""

    way: Way
    machine: Machine
    tail: float
    seed: int
    now: float = 0.0
    step: int = 0
    version: int = 0
    """That the engine holds; as many versions as steps have been published."""
    num_dispatched: int = 0
    waiting: list[Episode] = field(default_factory=list)
    running: list[Episode] = field(default_factory=list)
    done: dict[int, list[Episode]] = field(default_factory=dict)
    births: dict[int, int] = field(default_factory=dict)
    """Step at which each open group was dispatched."""
    trained_at: float = math.inf
    """When the trainer is done; infinite while it has nothing."""
    # measured
    since: float = 0.0
    tokens: float = 0.0
    busy_s: float = 0.0
    idle_s: float = 0.0
    ages: Counter[int] = field(default_factory=Counter)

    def play(self) -> Run:
        while self.step < STEPS:
            if math.isinf(self.trained_at):
                self._take()
            self._dispatch()
            self._advance()
        return self

    @property
    def is_measured(self) -> bool:
        return self.step >= WARMUP

    @property
    def seconds(self) -> float:
        return self.now - self.since

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    def _dispatch(self) -> None:
        way = self.way
        allowed = groups_admissible(
            max_staleness=way.max_staleness,
            groups_per_step=GROUPS_PER_STEP,
            num_dispatched=self.num_dispatched,
            num_dropped=0,
            num_published=self.step * GROUPS_PER_STEP,
        )
        if way.whole:
            allowed = 0 if self.running or self.waiting or allowed < GROUPS_PER_STEP else GROUPS_PER_STEP
        for _ in range(allowed):
            number = self.num_dispatched
            generator = np.random.default_rng((self.seed, number))
            lengths = Lengths(median=MEDIAN, p99_over_p50=self.tail, limit=LIMIT)
            self.waiting += [Episode(number, lengths.draw(generator)) for _ in range(GROUP_SIZE)]
            self.births[number] = self.step
            self.num_dispatched += 1
        if not way.whole or not self.running:
            self.version = self.step
        while self.waiting and len(self.running) < BATCH:
            self.running.append(self.waiting.pop(0))

    def _take(self) -> None:
        groups = []
        for number, birth in self.births.items():
            ended = self.done.get(number, [])
            under_way = [one for one in (*self.running, *self.waiting) if one.group == number]
            seen = [one.spans[0][0] for one in (*ended, *under_way) if one.spans]
            groups.append(OpenGroup(number, len(ended) == GROUP_SIZE, min(seen, default=None), birth))
        choice = choose_groups(
            groups, step=self.step, groups_per_step=GROUPS_PER_STEP, staleness_cap=NO_CAP, on_stale="mask"
        )
        if not choice.train:
            return
        spans = [span for number in choice.train for one in self.done.pop(number) for span in one.spans]
        for number in choice.train:
            del self.births[number]
        if self.is_measured:
            self._account(spans)
        self.trained_at = self.now + self.machine.train_s

    def _account(self, spans: list[tuple[int, float]]) -> None:
        table = {version: Position(0, version) for version in range(self.step + 1)}
        versions = np.array([version for version, _ in spans], dtype=np.int32)
        for age, (_, count) in zip(token_staleness(versions, table, Position(0, self.step), {}), spans, strict=True):
            self.ages[int(age)] += round(count)
            self.tokens += count

    def _advance(self) -> None:
        """To the next end of an episode or of a step."""
        is_training = not math.isinf(self.trained_at)
        samples = bool(self.running) and not (is_training and self.way.takes_turns)
        speed = self.machine.speed(len(self.running)) if samples else 0.0
        first = min(self.running, key=lambda one: one.left) if samples else None
        until = self.now + first.left / speed if first is not None else math.inf
        seconds = min(until, self.trained_at) - self.now
        if self.is_measured:
            self.busy_s += seconds * (len(self.running) if samples else 0)
            self.idle_s += 0.0 if is_training else seconds
        for one in self.running if samples else ():
            one.left -= speed * seconds
            _grow(one.spans, self.version, speed * seconds)
        self.now += seconds
        if first is not None and until <= self.trained_at:
            self.running.remove(first)
            self.done.setdefault(first.group, []).append(first)
        else:
            self.trained_at = math.inf
            self.step += 1
            if self.step == WARMUP:
                self.since = self.now


def _grow(spans: list[tuple[int, float]], version: int, count: float) -> None:
    if spans and spans[-1][0] == version:
        spans[-1] = (version, spans[-1][1] + count)
    elif count > 0:
        spans.append((version, count))


Found = dict[tuple[float, str], dict[str, list[Run]]]
"""By p99/p50, engine and way."""


def mean_length(tail: float) -> float:
    generator = np.random.default_rng(0)
    lengths = Lengths(median=MEDIAN, p99_over_p50=tail, limit=LIMIT)
    return mean(lengths.draw(generator) for _ in range(20_000))


def runs(tail: float, half: float, train_share: float) -> dict[str, list[Run]]:
    """``train_share``: of the time in which full slots sample a batch."""
    machine = Machine(half, train_share * mean_length(tail) / SLOT_TOKENS_PER_S + 1e-9)
    return {way.name: [Run(way, machine, tail, seed).play() for seed in range(SEEDS)] for way in WAYS}


def rows(found: Found) -> Iterator[tuple[object, ...]]:
    for (tail, engine), ways in found.items():
        for name, played in ways.items():
            ratios = [
                one.tokens_per_s / base.tokens_per_s for one, base in zip(played, ways["synchronous"], strict=True)
            ]
            off = mean(1 - one.ages[0] / one.ages.total() for one in played)
            yield (
                *(f"{tail:g}", engine, name, f"{mean(one.tokens_per_s for one in played):,.0f}"),
                *(f"{mean(ratios):.2f}", f"{min(ratios):.2f}-{max(ratios):.2f}"),
                f"{mean(one.busy_s / one.seconds for one in played) / BATCH:.0%}",
                f"{mean(one.idle_s / one.seconds for one in played):.0%}",
                f"{off:.0%}",
                f"{mean(sum(age * count for age, count in one.ages.items()) / one.ages.total() for one in played):.2f}",
            )


def table(head: tuple[str, ...], lines: Iterator[tuple[object, ...]]) -> str:
    shown = [head, ("---",) * len(head), *lines]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in shown)


HEAD = (
    *("p99/p50", "engine", "way", "trained tokens/s", "of synchronous", "seeds from-to", "slots taken"),
    *("trainer idle", "off-policy tokens", "mean age"),
)


def age_table(ways: dict[str, list[Run]]) -> str:
    lines = []
    for name, played in ways.items():
        total = sum((one.ages for one in played), Counter[int]())
        shares = [total[age] / total.total() for age in range(6)]
        lines.append((name, *(f"{share:.1%}" for share in shares), f"{1 - sum(shares):.1%}", max(total)))
    return table(("way", *map(str, range(6)), "older", "oldest"), iter(lines))


def reading(alone: Found, both: Found) -> str:
    lines = []
    for engine in ENGINES:
        for way in ("APRIL", "ours, 1", "ours, 4"):
            gains = _all_gains(alone, way, engine)
            lines.append(
                f"- Sampling alone, {engine} engine, {way}: {mean(gains) - 1:+.0%} on average, {max(gains) - 1:+.0%} "
                "at most (APRIL claims +22.5 % and +44 %)."
            )
    for engine in ENGINES:
        gains = _all_gains(both, "ours, 4", engine)
        lines.append(
            f"- With training, {engine} engine, ours, 4: {mean(gains):.2f}x on average, {max(gains):.2f}x at most "
            "(verl's fully asynchronous mode claims 2.35x to 2.67x)."
        )
    return "\n".join([*lines, NOT_MODELLED])


def _all_gains(found: Found, way: str, engine: str) -> list[float]:
    return [
        gain for (_, kind), ways in found.items() if kind == engine for gain in _gains(ways[way], ways["synchronous"])
    ]


def _gains(played: list[Run], base: list[Run]) -> list[float]:
    return [one.tokens_per_s / other.tokens_per_s for one, other in zip(played, base, strict=True)]


def main() -> None:
    cells = [(tail, engine) for tail in TAILS for engine in ENGINES]
    alone = {(tail, engine): runs(tail, ENGINES[engine], 0.0) for tail, engine in cells}
    both = {(tail, engine): runs(tail, ENGINES[engine], 1.0) for tail, engine in cells}
    text = PAGE.format(
        groups=GROUPS_PER_STEP,
        size=GROUP_SIZE,
        batch=BATCH,
        median=MEDIAN,
        limit=LIMIT,
        rate=SLOT_TOKENS_PER_S,
        steps=STEPS,
        warmup=WARMUP,
        seeds=SEEDS,
        alone=table(HEAD, rows(alone)),
        both=table(HEAD, rows(both)),
        ages=age_table(both[10.0, "linear"]),
        reading=reading(alone, both),
    )
    RESULTS.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
