from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_core.cli.profile import OF_A_STEP, OF_AN_EPISODE, Profile, advice, as_json_object, lines

SECONDS = st.floats(0.001, 1000)


def a_row(step: int, of_step: dict[str, float], of_episode: dict[str, float] | None = None) -> dict[str, float]:
    episode = of_episode or {}
    return (
        {"step": float(step)}
        | {f"time/{name}_s": value for name, value in of_step.items()}
        | {f"time/episode_{name}_s": value for name, value in episode.items()}
    )


def profile_of(*rows: dict[str, float]) -> Profile:
    found = Profile.of(rows)
    assert found is not None
    return found


TRAINS = {"train": 9.0, "wait": 0.5, "copy": 0.3, "behind": 0.2}
WAITS = {"train": 4.0, "wait": 5.0, "copy": 0.5, "behind": 0.5}
PUBLISHES = {"train": 4.0, "wait": 1.0, "copy": 0.5, "behind": 4.5}


@given(
    st.fixed_dictionaries(dict.fromkeys(OF_A_STEP, SECONDS)),
    st.fixed_dictionaries(dict.fromkeys(OF_AN_EPISODE, SECONDS)),
)
def test_shares_add_up_and_stand_in_the_order_of_their_size(step: dict[str, float], episode: dict[str, float]) -> None:
    found = profile_of(a_row(3, step, episode))
    for split, given_s in ((found.step, step), (found.episode, episode)):
        assert split is not None
        assert split.seconds == pytest.approx(sum(given_s.values()))
        assert sum(split.shares.values()) == pytest.approx(1.0)
        assert list(split.shares.values()) == sorted(split.shares.values(), reverse=True)


def test_one_step_that_hung_does_not_move_the_profile() -> None:
    rows = [a_row(step, TRAINS) for step in range(1, 10)]
    found = profile_of(*rows, a_row(10, {**TRAINS, "wait": 3600.0}))
    assert found.step == profile_of(*rows).step
    assert (found.first, found.last) == (1, 10)


def test_a_trainer_that_hardly_waits_is_what_binds() -> None:
    assert advice(profile_of(a_row(1, TRAINS))).startswith("Training itself binds: 90% of a step.")


@pytest.mark.parametrize(
    ("episode", "words"),
    [
        ({"engine": 3.0, "env": 1.0, "queue": 0.5}, "The engines take 67% of an episode"),
        ({"engine": 1.0, "env": 3.0, "queue": 0.5}, "The worlds take 67% of an episode"),
        ({"engine": 1.0, "env": 0.5, "queue": 3.0}, "Waiting takes 67% of an episode"),
    ],
)
def test_a_trainer_that_waits_is_told_what_its_episodes_wait_for(episode: dict[str, float], words: str) -> None:
    told = advice(profile_of(a_row(1, WAITS, episode)))
    assert told.startswith("Sampling binds: 50% of a step waits for groups.")
    assert words in told


def test_publishing_that_takes_longer_than_a_step_is_named() -> None:
    assert advice(profile_of(a_row(1, PUBLISHES))).startswith("Handing weights on binds: 45% of a step")


def test_a_job_on_recorded_episodes_tells_what_it_knows() -> None:
    found = profile_of(a_row(1, {"train": 2.0}))
    assert found.episode is None
    assert [line.split()[:2] for line in lines(found) if "100%" in line][:1] == [["trains", "100%"]]


def test_a_job_without_a_step_has_no_profile() -> None:
    assert Profile.of([]) is None
    assert Profile.of([{"step": 0.0, "eval/reward/mean": 0.5}]) is None


def test_what_is_printed_is_in_the_json_object_too() -> None:
    found = profile_of(a_row(7, WAITS, {"engine": 3.0}) | {"staleness/mean": 1.5})
    told = as_json_object(found)
    assert told["steps"] == [7, 7]
    assert told["beside"] == {"staleness/mean": 1.5}
    assert told["advice"] == lines(found)[-1]
    assert "data are 1.50 steps old when they are trained" in lines(found)


def test_the_page_shows_what_is_printed() -> None:
    """Of the run on the page, by its own numbers."""
    page = (Path(__file__).parents[2] / "docs" / "performance.md").read_text()
    step = {"train": 1.509, "wait": 0.1084, "copy": 0.0799, "behind": 0.00001}
    beside = {"time/publish_s": 0.3183, "time/engine_paused_s": 0.0889, "staleness/mean": 1.8948}
    row = a_row(14, step, {"engine": 1.538, "env": 0.0921, "queue": 0.0002})
    *told, _, words = lines(profile_of({**row, "step": 1.0}, row | beside | {"throughput/tokens_per_s": 749.8}))
    assert "\n".join(line.rstrip() for line in told) in page
    assert words in page.replace("\n", " ")
