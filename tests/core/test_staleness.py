"""Age in steps of the lineage, never negative; admission that no crash can exceed."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gspo_core.invariants import InvalidValue
from gspo_core.position import Position
from gspo_core.staleness import UnknownVersion, groups_admissible, shared_step, staleness, token_staleness

# Epoch 0 came to step 12; 1 forked off it at 8 and came to 10; 2 forked off 1 at 9; 3 fell back to epoch 0 at 7.
FORKS = {1: Position(0, 8), 2: Position(1, 9), 3: Position(0, 7)}


class TestAge:
    @pytest.mark.parametrize(
        ("version", "current", "age"),
        [
            (Position(0, 5), Position(0, 5), 0),
            (Position(0, 5), Position(0, 9), 4),
            # an ancestor: every step since then counts
            (Position(0, 5), Position(1, 9), 4),
            (Position(0, 8), Position(1, 8), 0),
            # rolled back: as old as the fork, although its own step is higher than the trainer's
            (Position(0, 12), Position(1, 8), 0),
            (Position(0, 12), Position(1, 10), 2),
            # through two forks
            (Position(0, 12), Position(2, 11), 3),
            (Position(0, 3), Position(2, 11), 8),
            (Position(1, 10), Position(2, 11), 2),
            (Position(1, 9), Position(2, 9), 0),
            # an epoch off the lineage altogether: as old as the last step that both share
            (Position(1, 10), Position(3, 7), 0),
            (Position(2, 15), Position(3, 10), 3),
            (Position(0, 7), Position(3, 10), 3),
            (Position(0, 12), Position(3, 7), 0),
        ],
    )
    def test_by_hand(self, version: Position, current: Position, age: int) -> None:
        assert staleness(version, current, FORKS) == age

    def test_a_version_from_the_future_is_an_error(self) -> None:
        with pytest.raises(InvalidValue):
            staleness(Position(0, 6), Position(0, 5), {})

    def test_an_epoch_without_a_record_is_an_error(self) -> None:
        with pytest.raises(UnknownVersion):
            staleness(Position(4, 6), Position(5, 7), {5: Position(0, 3)})

    def test_a_fork_that_leads_forward_is_an_error_and_no_endless_loop(self) -> None:
        with pytest.raises(InvalidValue):
            staleness(Position(1, 6), Position(3, 7), {1: Position(2, 3), 2: Position(1, 3), 3: Position(0, 1)})
        with pytest.raises(InvalidValue):
            staleness(Position(0, 6), Position(1, 7), {1: Position(1, 3)})

    def test_of_tokens(self) -> None:
        table = {10: Position(0, 5), 11: Position(0, 12), 14: Position(1, 9)}
        versions = np.array([14, 14, 10, 11, 14, 11], np.int32)
        ages = token_staleness(versions, table, Position(1, 10), FORKS)
        assert ages.dtype == np.int32
        assert ages.tolist() == [1, 1, 5, 2, 1, 2]
        assert token_staleness(versions[:0], table, Position(1, 10), FORKS).tolist() == []

    def test_of_tokens_of_an_unknown_version(self) -> None:
        with pytest.raises(UnknownVersion, match="version 7"):
            token_staleness(np.array([7], np.int32), {}, Position(0, 1), {})


@dataclass
class History:
    """Crashes and recoveries, with the lineage of each epoch written down step by step: the slow oracle."""

    forks: dict[int, Position] = field(default_factory=dict)
    lines: list[list[tuple[int, int]]] = field(default_factory=lambda: [[(0, 0)]])

    def shared(self, version: Position, current: Position) -> int:
        ours = self.lines[current.epoch][: current.step + 1]
        theirs = self.lines[version.epoch][: version.step + 1]
        return max(step for step, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a == b)


@st.composite
def histories(draw: st.DrawFn) -> History:
    """Each epoch forks off any older one, anywhere on its line, and trains some steps."""
    history = History()
    for epoch in range(draw(st.integers(1, 6))):
        if epoch:
            parent = draw(st.integers(0, epoch - 1))
            line = history.lines[parent]
            step = draw(st.integers(0, len(line) - 1))
            # The recorded origin is the epoch in which that step was made.
            history.forks[epoch] = Position(line[step][0], step)
            history.lines.append(line[: step + 1])
        line = history.lines[epoch]
        line += [(epoch, step) for step in range(len(line), len(line) + draw(st.integers(0, 5)))]
    return history


class TestAgainstAWrittenHistory:
    @settings(max_examples=150)
    @given(history=histories(), data=st.data())
    def test_age_counts_from_the_last_step_in_common(self, history: History, data: st.DataObject) -> None:
        epochs = st.integers(0, len(history.lines) - 1)

        def position() -> Position:
            epoch = data.draw(epochs)
            return Position(epoch, data.draw(st.integers(0, len(history.lines[epoch]) - 1)))

        version, current = position(), position()
        if version.epoch == current.epoch and version.step > current.step:
            version = Position(version.epoch, current.step)
        shared = history.shared(version, current)
        assert shared_step(version, current, history.forks) == shared
        assert staleness(version, current, history.forks) == current.step - shared >= 0

    @settings(max_examples=150)
    @given(
        forks=st.dictionaries(st.integers(1, 6), st.builds(Position, st.integers(0, 5), st.integers(0, 20))),
        version=st.builds(Position, st.integers(0, 6), st.integers(0, 20)),
        current=st.builds(Position, st.integers(0, 6), st.integers(0, 20)),
    )
    def test_even_nonsense_in_the_records_gives_no_negative_age(
        self, forks: dict[int, Position], version: Position, current: Position
    ) -> None:
        with contextlib.suppress(InvalidValue, UnknownVersion):
            assert staleness(version, current, forks) >= 0


class TestAdmission:
    @pytest.mark.parametrize(
        ("max_staleness", "dispatched", "dropped", "published", "admissible"),
        [
            (0, 0, 0, 0, 4),
            (0, 4, 0, 0, 0),
            (0, 4, 0, 4, 4),
            (0, 4, 1, 0, 1),
            (1, 4, 0, 0, 4),
            (1, 8, 0, 0, 0),
            (1, 8, 0, 4, 4),
            (2, 12, 2, 4, 6),
            # after a rollback more may be occupied than there are slots: nothing is admitted, nothing breaks
            (1, 20, 0, 4, 0),
        ],
    )
    def test_by_hand(self, max_staleness: int, dispatched: int, dropped: int, published: int, admissible: int) -> None:
        found = groups_admissible(
            max_staleness=max_staleness,
            groups_per_step=4,
            num_dispatched=dispatched,
            num_dropped=dropped,
            num_published=published,
        )
        assert found == admissible

    @pytest.mark.parametrize(
        "counts", [(1, 4, 3, 2, 2), (-1, 4, 0, 0, 0), (1, 0, 0, 0, 0)], ids=["freed twice", "staleness", "step size"]
    )
    def test_refuses_counts_that_cannot_be(self, counts: tuple[int, int, int, int, int]) -> None:
        names = ("max_staleness", "groups_per_step", "num_dispatched", "num_dropped", "num_published")
        with pytest.raises(InvalidValue):
            groups_admissible(**dict(zip(names, counts, strict=True)))


@dataclass
class Run:
    """What survives a crash: the batch logs (groups of each step, drops) and the groups in the queue."""

    taken: dict[int, list[int]] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)
    dispatched: int = 0


class Pacing(RuleBasedStateMachine):
    """A trainer that admits as told, with slow episodes, drops, steps that are not published yet, and crashes.

    Every group remembers the step that was published when it was started; the oracle counts occupied slots one by one.
    """

    @initialize(max_staleness=st.integers(0, 3), groups_per_step=st.integers(1, 3))
    def start(self, max_staleness: int, groups_per_step: int) -> None:
        self.max_staleness, self.groups_per_step = max_staleness, groups_per_step
        self.capacity = (max_staleness + 1) * groups_per_step
        self.run = Run()
        self.step = self.published = 0
        self.started_at: dict[int, int] = {}
        self.finished: set[int] = set()
        self.was_rolled_back = False

    def occupied(self) -> set[int]:
        freed = {group for step, groups in self.run.taken.items() if step <= self.published for group in groups}
        return set(range(self.run.dispatched)) - freed - self.run.dropped

    def waiting(self) -> list[int]:
        taken = {group for groups in self.run.taken.values() for group in groups}
        return [group for group in range(self.run.dispatched) if group not in taken | self.run.dropped]

    @rule()
    def admit(self) -> None:
        before = len(self.occupied())
        admissible = groups_admissible(
            max_staleness=self.max_staleness,
            groups_per_step=self.groups_per_step,
            num_dispatched=self.run.dispatched,
            num_dropped=len(self.run.dropped),
            num_published=sum(len(groups) for step, groups in self.run.taken.items() if step <= self.published),
        )
        for _ in range(admissible):
            self.started_at[self.run.dispatched] = self.published
            self.run.dispatched += 1
        # All slots are used and not one more, however the run came to be where it is.
        assert len(self.occupied()) == max(before, self.capacity)

    @rule(choice=st.randoms(use_true_random=False))
    def finish_one(self, choice: object) -> None:
        unfinished = [group for group in self.waiting() if group not in self.finished]
        if unfinished:
            self.finished.add(choice.choice(unfinished))  # type: ignore[attr-defined]

    @rule(choice=st.randoms(use_true_random=False))
    def drop_one(self, choice: object) -> None:
        if self.waiting():
            self.run.dropped.add(choice.choice(self.waiting()))  # type: ignore[attr-defined]

    @precondition(lambda self: self.step == self.published)
    @rule()
    def train(self) -> None:
        """Take the oldest groups, when they are finished, and step; the weights are not published yet."""
        oldest = self.waiting()[: self.groups_per_step]
        if len(oldest) < self.groups_per_step or not self.finished.issuperset(oldest):
            return
        for group in oldest:
            age = self.step - self.started_at[group]
            # Drops or not. Only what a rollback left over may be older: there the cap decides, not admission.
            if not self.was_rolled_back:
                assert 0 <= age <= self.max_staleness
        self.step += 1
        self.run.taken[self.step] = oldest

    @precondition(lambda self: self.step > self.published)
    @rule()
    def publish(self) -> None:
        self.published = self.step

    @rule(back=st.integers(0, 3))
    def crash(self, back: int) -> None:
        """Another trainer takes over at an older checkpoint: newer steps are replayed, so their groups wait again."""
        checkpoint = max(0, self.published - back)
        if checkpoint < self.step:
            self.was_rolled_back = True
        self.step = self.published = checkpoint
        for step in [step for step in self.run.taken if step > checkpoint]:
            self.finished.update(self.run.taken.pop(step))

    @invariant()
    def no_more_is_started_than_the_slots(self) -> None:
        if hasattr(self, "run") and not self.was_rolled_back:
            assert len(self.occupied()) <= self.capacity


TestPacing = Pacing.TestCase
TestPacing.settings = settings(max_examples=40, stateful_step_count=50)


@pytest.mark.parametrize("published", [3, 2, 1])
def test_nothing_is_started_after_a_rollback_until_the_slots_are_free_again(published: int) -> None:
    """Eight groups in flight fill the slots. Falling back frees nothing, although fewer steps are over than before."""
    admissible = groups_admissible(
        max_staleness=1,
        groups_per_step=4,
        num_dispatched=20,
        num_dropped=0,
        num_published=4 * published,
    )
    assert admissible == 0


def test_who_begins_anew_shares_the_beginning_with_epochs_that_left_no_record() -> None:
    """Epoch 6 died before it had begun; nothing was saved or logged until then."""
    forks = {2: Position(1, 0), 7: Position(6, 0)}
    for version in (Position(1, 0), Position(2, 0), Position(1, 3), Position(2, 3)):
        assert staleness(version, Position(7, 2), forks) == 2
