"""Places between jobs: by priority, none wasted."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from services.workers.worker import Want, divide

WANTS = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=2),
    st.builds(Want, st.sampled_from([0.01, 0.5, 1.0, 2.0, 100.0]), st.integers(0, 50)),
    max_size=6,
)


def test_equal_jobs_share_equally_and_priority_weighs() -> None:
    assert divide(12, {"a": Want(1, 100), "b": Want(1, 100), "c": Want(1, 100)}) == {"a": 4, "b": 4, "c": 4}
    assert divide(12, {"a": Want(1, 100), "b": Want(3, 100)}) == {"a": 3, "b": 9}


def test_what_one_does_not_need_goes_to_the_others() -> None:
    assert divide(12, {"a": Want(1, 2), "b": Want(1, 100), "c": Want(1, 100)}) == {"a": 2, "b": 5, "c": 5}
    assert divide(12, {"a": Want(100, 2), "b": Want(0.01, 100)}) == {"a": 2, "b": 10}


def test_too_few_places_go_to_the_most_important_jobs_and_equals_take_turns() -> None:
    wants = {"a": Want(1, 9), "b": Want(0.5, 9), "c": Want(1, 9), "d": Want(2, 9), "e": Want(1, 9)}
    shares = [divide(3, wants, turn) for turn in range(3)]
    assert [sorted(job for job, num in share.items() if num) for share in shares] == [
        ["a", "c", "d"],
        ["c", "d", "e"],
        ["a", "d", "e"],
    ]


def test_too_few_places_go_to_nobody_who_has_nothing_to_play() -> None:
    wants = {"high": Want(3, 1, is_idle=True), "low": Want(1, 9)}
    assert divide(1, wants) == {"high": 0, "low": 1}
    assert divide(2, wants) == {"high": 1, "low": 1}


def test_a_job_that_wants_nothing_for_a_moment_moves_no_turn_on() -> None:
    wants = {name: Want(1, 9) for name in "abcd"}
    before = [divide(1, wants, turn)["b"] for turn in range(4)]
    after = [divide(1, wants | {"d": Want(1, 0)}, turn)["b"] for turn in range(4)]
    assert (before, after) == ([0, 1, 0, 0], [0, 1, 0, 0])


@given(places=st.integers(0, 64), wants=WANTS)
def test_no_place_is_wasted_and_nobody_who_wants_one_is_left_out(places: int, wants: dict[str, Want]) -> None:
    shares = divide(places, wants)
    assert sum(shares.values()) == min(places, sum(want.num_places for want in wants.values()))
    assert all(shares[job] <= want.num_places for job, want in wants.items())
    hungry = [job for job, want in wants.items() if want.num_places]
    if places >= len(hungry):
        assert all(shares[job] for job in hungry)


@given(places=st.integers(0, 64), wants=WANTS)
def test_of_two_alike_the_one_with_more_priority_gets_no_less(places: int, wants: dict[str, Want]) -> None:
    shares = divide(places, {job: Want(want.priority, 50) for job, want in wants.items()})
    ranked = sorted(shares, key=lambda job: wants[job].priority)
    for lesser, greater in pairwise(ranked):
        assert shares[greater] >= shares[lesser] - 1
