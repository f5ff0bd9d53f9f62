"""Erased episodes: their step is still counted, and nothing trains it again as if nothing had happened."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from gspo_core.cli import main
from gspo_core.log import layout
from gspo_core.log.batches import (
    HEADER_BYTES,
    ErasedStep,
    LoggedBatch,
    decode_batch,
    encode_batch,
    has_erased,
    require_whole,
)
from gspo_core.log.erasing import users_of, without_texts
from gspo_core.position import Position
from gspo_core.replay.past import NotKept, Past
from gspo_core.replay.question import ReplayQuestion
from gspo_core.replay.replaying import replay
from gspo_core.replay.rescoring import rescore
from gspo_core.types import Asked, Group, Split, Trajectory
from tests.core.learner_support import write_model
from tests.core.past_kit import GROUPS, SIZE, MadePast, make_past, spec_of
from tests.core.segments import segment


def batch_of(*users: str) -> LoggedBatch:
    """One group with an episode for each user."""
    episodes = []
    for member, user in enumerate(users):
        key = segment().key
        one = type(key)(key.job, 0, member)
        asked = Asked(None, "", "messages", f"named by {user}", 1, 0)
        first = segment(key=one, index=0, outcome=None, asked=asked, user=user)
        episodes.append(Trajectory((first, segment(key=one, index=1))))
    group = Group(episodes[0].key.job, 0, Split.TRAIN, 0, len(users), tuple(episodes))
    return LoggedBatch(1, 3, (group,), {"staleness": {}})


def rewritten(batch: LoggedBatch, members: Sequence[tuple[int, int]]) -> bytes:
    return b"".join(without_texts(batch, members))


def test_what_was_said_is_gone_and_what_counts_is_left() -> None:
    batch = batch_of("ann", "bob")
    data = rewritten(batch, [(0, 0)])
    assert b"ann" not in data
    assert b"bob" in data
    read = decode_batch(data)
    (gone, kept), (was, _) = read.trajectories, batch.trajectories
    assert (read.position, read.erased) == (batch.position, {(0, 0)})
    assert kept.segments == batch.trajectories[1].segments
    assert (gone.outcome, gone.versions, gone.num_actions) == (was.outcome, was.versions, was.num_actions)
    assert [one.num_tokens for one in gone.segments] == [one.num_tokens for one in was.segments]
    for one in gone.segments:
        assert not one.token_ids.any()
        assert not one.behavior_logprobs.any()
    assert (users_of(gone), users_of(was), users_of(kept)) == ([], ["ann"], ["bob"])


def test_the_bytes_say_that_it_was_erased_and_are_checked_as_any(tmp_path: Path) -> None:
    batch = batch_of("ann", "bob")
    whole = b"".join(encode_batch(batch.position, batch.groups, batch.extra))
    data = rewritten(batch, [(0, 0)])
    assert (has_erased(whole[:HEADER_BYTES]), has_erased(data[:HEADER_BYTES]), has_erased(b"")) == (False, True, False)
    again = rewritten(decode_batch(data), [(0, 1)])
    assert decode_batch(again).erased == {(0, 0), (0, 1)}
    assert rewritten(decode_batch(again), [(0, 1)]) == again
    for place in range(0, len(data), 7):
        damaged = bytearray(data)
        damaged[place] ^= 1
        with pytest.raises(ValueError, match=r"."):
            decode_batch(bytes(damaged))


def test_a_step_with_an_erased_episode_is_not_whole() -> None:
    batch = decode_batch(rewritten(batch_of("ann", "bob"), [(0, 1)]))
    with pytest.raises(ErasedStep, match="step 3 was trained on episodes that were erased since: 0/1"):
        require_whole(batch)
    require_whole(batch_of("ann"))


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> MadePast:
    spec = spec_of(write_model(tmp_path_factory.mktemp("model")))
    return make_past(tmp_path_factory.mktemp("jobs") / "job_a", spec)


def erased_at(past: MadePast, tmp_path: Path, step: int, group: int, member: int) -> Path:
    folder = tmp_path / "job_a"
    shutil.copytree(past.folder, folder)
    path = folder / layout.BATCHES / layout.step_name(Position(1, step))
    path.write_bytes(rewritten(decode_batch(path.read_bytes()), [(group, member)]))
    return folder


def test_a_replay_of_an_erased_step_says_so_and_others_go_on(
    past: MadePast, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checkpoints are of the steps 2, 4 and 6."""
    folder = erased_at(past, tmp_path, 3, 2 * GROUPS, 1)
    with pytest.raises(NotKept, match=rf"step 3 was trained on episodes that were erased since: {2 * GROUPS}/1"):
        replay(Past(folder), ReplayQuestion(3, 3))
    with pytest.raises(NotKept, match="episodes of the steps 3 were erased"):
        replay(Past(folder), ReplayQuestion(4, 4))
    assert replay(Past(folder), ReplayQuestion(5, 5)).is_same
    assert replay(Past(folder), ReplayQuestion(2, 2)).is_same
    assert main(["replay", f"{folder}@3"]) != 0
    assert "were erased since" in capsys.readouterr().err


def test_another_reward_is_not_asked_about_what_is_gone(past: MadePast, tmp_path: Path) -> None:
    folder = erased_at(past, tmp_path, 3, 2 * GROUPS, 1)
    rows = list(rescore(Past(folder), lambda episode: episode.reward, [3]))
    assert len(rows) == GROUPS * SIZE - 1
    assert all(one.new == one.old and one.new_advantage == one.old_advantage for one in rows)
    assert not [one for one in rows if (one.episode.group, one.episode.member) == (2 * GROUPS, 1)]


def test_log_probs_are_erased_because_they_give_tokens_back(past: MadePast, tmp_path: Path) -> None:
    folder = erased_at(past, tmp_path, 1, 0, 0)
    batch = Past(folder).batch(1)
    blank = [one for one in batch.trajectories if (one.key.group, one.key.member) == (0, 0)]
    assert [float(np.abs(one.behavior_logprobs).sum()) for one in blank[0].segments] == [0.0] * len(blank[0].segments)
