"""Assembling gives the same result however segments arrive and wherever an episode was cut."""

from __future__ import annotations

import itertools
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_core.assemble import Assembler, ConflictingSegment, ForeignSegment
from gspo_core.codec import SegmentRejected, decode, encode
from gspo_core.types import Branch, EpisodeKey, Outcome, Segment, Split, StopReason, Trajectory
from tests.core.segments import JOB, episode, segment

KEY = EpisodeKey(JOB, 3, 1)
SIZE = 3


def assembled(segments: list[Segment]) -> Assembler:
    assembler = Assembler()
    for one in segments:
        assembler.add(one)
    return assembler


def open_segment(index: int, **changes: Any) -> Segment:
    return segment(**({"key": KEY, "index": index, "outcome": None} | changes))


def last_segment(index: int, **changes: Any) -> Segment:
    return segment(**({"key": KEY, "index": index} | changes))


class TestComplete:
    def test_when_every_segment_is_here(self) -> None:
        pieces = episode(KEY, cuts=[3, 7])
        assembler = Assembler()
        for piece in pieces[:-1]:
            assembler.add(piece)
            assert assembler.trajectory(KEY) is None
        assembler.add(pieces[-1])
        found = assembler.trajectory(KEY)
        assert found is not None
        assert found.segments == pieces

    def test_not_while_there_is_a_gap(self) -> None:
        first, middle, last = episode(KEY, cuts=[3, 7])
        assembler = assembled([last, first])
        assert assembler.trajectory(KEY) is None
        assert assembler.prefix(KEY) == (first,)
        assembler.add(middle)
        assert assembler.trajectory(KEY) is not None

    def test_unknown_episodes_are_none(self) -> None:
        assembler = Assembler()
        assert assembler.trajectory(KEY) is None
        assert assembler.group(JOB, 3, Split.TRAIN, 0, 1) is None
        assert (assembler.prefix(KEY), assembler.episodes()) == ((), ())

    def test_a_group_when_every_member_is(self) -> None:
        assembler = Assembler()
        for member in range(SIZE):
            assert assembler.group(JOB, 3, Split.EVAL, 9, SIZE) is None
            for piece in episode(EpisodeKey(JOB, 3, member), cuts=[5], reward=float(member)):
                assembler.add(piece)
        group = assembler.group(JOB, 3, Split.EVAL, 9, SIZE)
        assert group is not None
        assert (group.rewards, group.split, group.task_index, group.size) == ((0.0, 1.0, 2.0), Split.EVAL, 9, SIZE)
        assert assembler.group("job-2", 3, Split.EVAL, 9, SIZE) is None

    def test_a_group_without_the_members_that_will_never_be(self) -> None:
        whole = [piece for member in (0, 2) for piece in episode(EpisodeKey(JOB, 3, member), cuts=[3])]
        begun = open_segment(0)
        assembler = assembled([*whole, begun])
        assert assembler.group(JOB, 3, Split.TRAIN, 5, SIZE) is None
        assert assembler.group(JOB, 3, Split.TRAIN, 5, SIZE, missing=[2]) is None
        group = assembler.group(JOB, 3, Split.TRAIN, 5, SIZE, missing=[1])
        assert group is not None
        assert [trajectory.key.member for trajectory in group] == [0, 2]

    def test_progress_of_unfinished_episodes_is_known(self) -> None:
        assembler = assembled([*episode(EpisodeKey(JOB, 5, 2), cuts=[4])[:1], *episode(KEY, cuts=[3, 7])[:2]])
        assert assembler.episodes() == (KEY, EpisodeKey(JOB, 5, 2))
        assert sum(piece.num_tokens for piece in assembler.prefix(KEY)) == 7


class TestOrderAndDuplicates:
    @settings(max_examples=100)
    @given(
        cuts=st.lists(st.lists(st.integers(1, 11), max_size=5), min_size=SIZE, max_size=SIZE),
        attempts=st.lists(st.integers(0, 3), min_size=SIZE, max_size=SIZE),
        data=st.data(),
    )
    def test_change_nothing(self, cuts: list[list[int]], attempts: list[int], data: st.DataObject) -> None:
        """Whatever comes, in whatever order, as often as it likes, older attempts and other groups among it."""
        expected = {}
        arriving: list[Segment] = []
        for member, newest in enumerate(attempts):
            key = EpisodeKey(JOB, 3, member)
            for attempt in range(newest + 1):
                pieces = episode(key, [cut + attempt for cut in cuts[member]], attempt=attempt, reward=float(attempt))
                whole = attempt == newest or data.draw(st.booleans())
                arriving += pieces if whole else pieces[:-1]
            expected[member] = pieces
        arriving += episode(EpisodeKey(JOB, 4, 0), cuts=[6])
        duplicates = data.draw(st.lists(st.sampled_from(arriving), max_size=10))
        # What is sent again is not the same object: it was decoded another time.
        order = data.draw(st.permutations(arriving + [decode(encode(one)) for one in duplicates]))
        group = assembled(order).group(JOB, 3, Split.TRAIN, 7, SIZE)
        assert group is not None
        assert {trajectory.key.member: trajectory.segments for trajectory in group} == expected
        assert group.rewards == tuple(map(float, attempts))

    @settings(max_examples=100)
    @given(cuts=st.lists(st.integers(1, 11), max_size=6), data=st.data())
    def test_the_prefix_is_what_is_here_up_to_the_first_gap(self, cuts: list[int], data: st.DataObject) -> None:
        pieces = episode(KEY, cuts)
        here = data.draw(st.permutations(pieces).map(lambda order: order[: data.draw(st.integers(0, len(order)))]))
        gap = next(index for index in range(len(pieces) + 1) if index == len(pieces) or pieces[index] not in here)
        assert assembled(list(here)).prefix(KEY) == pieces[:gap]


class TestAttempts:
    def test_a_higher_one_starts_the_episode_again(self) -> None:
        old, new = episode(KEY, cuts=[3]), episode(KEY, cuts=[8], attempt=1, reward=0.5)
        assembler = assembled([*old, new[0]])
        assert assembler.trajectory(KEY) is None
        assert assembler.prefix(KEY) == new[:1]
        assembler.add(new[1])
        found = assembler.trajectory(KEY)
        assert found is not None
        assert (found.attempt, found.reward) == (1, 0.5)

    def test_what_comes_late_from_a_lower_one_is_ignored(self) -> None:
        new = episode(KEY, cuts=[8], attempt=1)
        assembler = assembled([*new, *episode(KEY, cuts=[3])])
        assert assembler.prefix(KEY) == new

    def test_a_conflict_in_a_superseded_attempt_does_not_matter(self) -> None:
        assembler = assembled([open_segment(0), open_segment(0, attempt=1)])
        assembler.add(open_segment(0, version=99))
        assert assembler.prefix(KEY) == (open_segment(0, attempt=1),)


class TestConflicts:
    @pytest.mark.parametrize(
        ("known", "other"),
        [
            (open_segment(0), open_segment(0, version=8)),
            (open_segment(0), open_segment(0, token_ids=[11, 12, 13, 15])),
            (open_segment(0), open_segment(0, behavior_logprobs=[0.0, -0.5, -0.25, -1.5])),
            (open_segment(0), last_segment(0)),
            (last_segment(0), last_segment(0, outcome=Outcome(StopReason.COMPLETED, 0.0))),
            (last_segment(2), open_segment(3)),
            (last_segment(2), last_segment(3)),
        ],
    )
    def test_two_claims_for_one_place_are_an_error_in_either_order(self, known: Segment, other: Segment) -> None:
        for first, second in ((known, other), (other, known)):
            assembler = assembled([first])
            with pytest.raises(ConflictingSegment):
                assembler.add(second)
            # The one that was refused leaves no trace.
            assembler.add(first)
            assert assembler.episodes() == (KEY,)
            assert assembler.prefix(KEY) == ((first,) if first.index == 0 else ())

    def test_a_complete_episode_does_not_change_any_more(self) -> None:
        pieces = episode(KEY, cuts=[4])
        assembler = assembled(list(pieces))
        before = assembler.trajectory(KEY)
        for intruder in (open_segment(2), last_segment(2), open_segment(0, version=50)):
            with pytest.raises(ConflictingSegment):
                assembler.add(intruder)
        assert assembler.trajectory(KEY) is before

    @pytest.mark.parametrize("other", [open_segment(1, version=99), last_segment(1)])
    def test_an_episode_is_never_joined_from_two_that_contradict_each_other(self, other: Segment) -> None:
        """Redis failed over, and had lost the end of what its trainer had read: the rest continues something else."""
        first, middle, last = episode(KEY, cuts=[3, 7])
        assembler = assembled([first, middle])
        for intruder in (other, other):
            with pytest.raises(ConflictingSegment):
                assembler.add(intruder)
        assembler.add(last)
        assert assembler.trajectory(KEY) is None
        assert assembler.group(JOB, KEY.group, Split.TRAIN, 0, 2, missing=[0]) is None
        assert assembler.broken(KEY.group) == {KEY.member: 0}
        assert assembler.broken(KEY.group + 1) == {}
        again = episode(KEY, cuts=[8], attempt=1)
        for piece in again:
            assembler.add(piece)
        found = assembler.trajectory(KEY)
        assert found is not None
        assert found.segments == again
        assert assembler.broken(KEY.group) == {}

    def test_whether_a_whole_episode_was_asked_for_before_a_conflict_changes_nothing(self) -> None:
        pieces = episode(KEY, cuts=[4])
        assembler = assembled(list(pieces))
        with pytest.raises(ConflictingSegment):
            assembler.add(open_segment(0, version=50))
        found = assembler.trajectory(KEY)
        assert found is not None
        assert (found.segments, assembler.broken(KEY.group)) == (pieces, {})

    def test_an_attempt_that_was_undone_never_completes(self) -> None:
        """Redis failed over, and had lost that a later attempt was begun: the one before it goes on."""
        first, last = episode(KEY, cuts=[3])
        assembler = assembled([first, open_segment(0, attempt=1)])
        assembler.require_not_undone(open_segment(1, attempt=1))
        assembler.require_not_undone(open_segment(1, key=EpisodeKey(JOB, KEY.group, 2)))
        with pytest.raises(ConflictingSegment, match="attempt 0: it goes on although attempt 1 had begun"):
            assembler.require_not_undone(last)
        assert assembler.broken(KEY.group) == {KEY.member: 1}
        for piece in episode(KEY, cuts=[8], attempt=2):
            assembler.require_not_undone(piece)
            assembler.add(piece)
        assert assembler.trajectory(KEY) is not None

    def test_a_whole_attempt_stays_when_the_one_before_it_goes_on(self) -> None:
        whole = episode(KEY, cuts=[4], attempt=1)
        assembler = assembled(list(whole))
        with pytest.raises(ConflictingSegment):
            assembler.require_not_undone(open_segment(1))
        assert assembler.broken(KEY.group) == {}
        assert assembler.trajectory(KEY) is not None

    def test_a_segment_of_another_job(self) -> None:
        assembler = assembled([open_segment(0)])
        with pytest.raises(ForeignSegment):
            assembler.add(open_segment(0, key=EpisodeKey("job-2", 3, 1)))

    def test_they_are_refusals_like_those_of_the_codec(self) -> None:
        assert issubclass(ConflictingSegment, SegmentRejected)
        assert issubclass(ForeignSegment, SegmentRejected)


class TestForget:
    def test_frees_the_group_and_ignores_what_still_comes(self) -> None:
        assembler = assembled([*episode(KEY, cuts=[4]), *episode(EpisodeKey(JOB, 4, 0), cuts=[4])])
        assembler.forget(3)
        assert assembler.trajectory(KEY) is None
        for piece in episode(KEY, cuts=[4]):
            assembler.add(piece)
        assert assembler.episodes() == (EpisodeKey(JOB, 4, 0),)

    def test_a_group_of_which_nothing_came_yet(self) -> None:
        assembler = Assembler()
        assembler.forget(3)
        assembler.add(open_segment(0))
        assert assembler.episodes() == ()

    @settings(max_examples=50)
    @given(st.lists(st.integers(0, 25), max_size=40))
    def test_exactly_the_forgotten_groups_are_ignored(self, forgotten: list[int]) -> None:
        assembler = Assembler()
        for group in forgotten:
            assembler.forget(group)
        for group in range(26):
            assembler.add(open_segment(0, key=EpisodeKey(JOB, group, 0)))
        assert [key.group for key in assembler.episodes()] == [group for group in range(26) if group not in forgotten]

    def test_a_long_run_needs_no_memory_for_what_is_over(self) -> None:
        assembler = Assembler()
        tracemalloc.start()
        try:
            for group in range(1000, 21_000, 2):
                assembler.forget(group + 1)
                assembler.forget(group)
            assert tracemalloc.get_traced_memory()[0] < 20_000
        finally:
            tracemalloc.stop()


@st.composite
def ledgers(draw: st.DrawFn) -> dict[str, Any]:
    """An episode place by place: versions and turns in runs, everything else distinct at each place."""
    runs = draw(st.lists(st.tuples(st.integers(1, 6), st.booleans(), st.booleans()), min_size=1, max_size=8))
    versions, turns = [], []
    for length, updated, turned in runs:
        versions += [(versions[-1] if versions else 3) + updated] * length
        turns += [(turns[-1] if turns else 0) + turned] * length
    n = len(versions)
    mask = np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    return {
        "version": np.array(versions),
        "turn": np.array(turns),
        "token_ids": np.arange(100, 100 + n),
        "action_mask": mask,
        "behavior_logprobs": np.where(mask, -np.arange(1, n + 1) / 64, 0).astype(np.float32),
    }


def cut(ledger: dict[str, Any], also_at: set[int]) -> list[Segment]:
    """The ledger as segments: cut where version or turn change, as it must be, and at ``also_at``."""
    n = len(ledger["token_ids"])
    changes = {i for i in range(1, n) for name in ("version", "turn") if ledger[name][i] != ledger[name][i - 1]}
    edges = sorted({0, n} | changes | {place for place in also_at if 0 < place < n})
    return [
        segment(
            key=KEY,
            index=index,
            version=int(ledger["version"][start]),
            turn=int(ledger["turn"][start]),
            token_ids=ledger["token_ids"][start:end],
            action_mask=ledger["action_mask"][start:end],
            behavior_logprobs=ledger["behavior_logprobs"][start:end],
            outcome=Outcome(StopReason.COMPLETED, 1.0) if end == n else None,
        )
        for index, (start, end) in enumerate(itertools.pairwise(edges))
    ]


def stitched(trajectory: Trajectory | None) -> Branch:
    assert trajectory is not None
    return Branch(trajectory.segments)


class TestSegmentation:
    @settings(max_examples=100)
    @given(ledger=ledgers(), cuts=st.sets(st.integers(1, 48)), data=st.data())
    def test_where_an_episode_is_cut_changes_nothing(
        self, ledger: dict[str, Any], cuts: set[int], data: st.DataObject
    ) -> None:
        """Every array equals the ledger, place by place, and so do the two numbers that the ratio needs."""
        pieces = [decode(encode(piece)) for piece in cut(ledger, cuts)]
        trajectory = assembled(data.draw(st.permutations(pieces))).trajectory(KEY)
        branch = stitched(trajectory)
        assert np.array_equal(branch.token_ids, ledger["token_ids"])
        assert np.array_equal(branch.action_mask, ledger["action_mask"])
        assert np.array_equal(branch.behavior_logprobs, ledger["behavior_logprobs"])
        assert np.array_equal(branch.versions, ledger["version"])
        assert np.array_equal(branch.turn_ids, ledger["turn"])
        assert branch.num_actions == int(ledger["action_mask"].sum())
        total = sum(piece.logprob_sum for piece in branch.segments)
        assert total == pytest.approx(float(ledger["behavior_logprobs"].sum(dtype=np.float64)), rel=1e-12, abs=1e-12)
