"""What is kept of an agent's episode beside its segments: a part for each change, and all of them together."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from gspo_core.chat import HermesCodec
from gspo_core.codec import decode
from gspo_core.types import StopReason
from services.episodes.matching import TurnEntry
from services.episodes.snapshots import StoredReward, TreeParts, TreeSnapshot
from services.gateway.dialects.turns import Refusal, RefusalKind
from services.state.queue import Append, Kept, Snapshot
from tests.services.gateway.gateway_kit import BabblingPolicy, Bench, HeldRecords, request, said, take, user

NUM_TURNS = 500
# An entry has 170 bytes, and is told when its turn begins, when it has ended, and when it was delivered.
TURN_BYTES = 700


def tree_of(records: HeldRecords) -> TreeSnapshot:
    held = records.snapshot
    assert held is not None
    tree = TreeSnapshot.together([held.data, *held.parts])
    assert tree is not None
    return tree


def again(bench: Bench, *, begins_again: bool = False) -> Bench:
    """Another gateway that takes the episode over."""
    other = Bench(bench.codec, bench.records, bench.policy)
    other.episode.restore(bench.records.segments(), tree_of(bench.records), begins_again=begins_again)
    return other


async def refused(asking: Any) -> RefusalKind:
    with pytest.raises(Refusal) as refusal:
        await asking
    return refusal.value.kind


async def test_what_is_written_for_a_turn_does_not_grow_over_five_hundred(codec: HermesCodec):
    bench = Bench(codec, context_tokens=1_000_000)
    written = []
    for number in range(NUM_TURNS):
        before = bench.records.num_kept_bytes
        # Short conversations, each beside the others.
        bench.policy.speeches = [[*codec.tokenizer.encode("Yes."), codec.stop_ids[0]]]
        await bench.ask(user(f"question {number:03}"))
        written.append(bench.records.num_kept_bytes - before)
    assert len(bench.episode.history.entries) == NUM_TURNS
    assert max(written) <= TURN_BYTES
    assert max(written[-100:]) <= max(written[:100]) + 16  # numbers that are longer
    assert len(tree_of(bench.records).turns) == NUM_TURNS


async def test_all_parts_together_say_what_the_episode_knows(codec: HermesCodec):
    bench = Bench(codec)
    answer = await bench.ask(user("one"))
    await bench.ask(user("one"), said(answer), user("two"))
    await bench.episode.reward(0.5, token="a", pays=True)
    await bench.episode.reward(0.25, turn=answer.id, pays=True)
    repeated = request(user("one"), repeat_key="again", is_retry=True)
    await take(await bench.episode.ask(repeated))
    await bench.episode.finish()
    tree, entries = tree_of(bench.records), bench.episode.history.entries
    assert {entry.number: entry for entry in tree.turns} == entries
    assert tree.rewards == bench.episode.rewards.posted
    assert tree.finished
    other = again(bench)
    assert other.episode.finished.is_set()
    assert other.episode.history.entries == entries


async def test_a_turn_is_kept_in_one_call_with_its_first_tokens_also_while_another_is_delivered(codec: HermesCodec):
    bench = Bench(codec)
    first = await bench.episode.ask(request(user("one")))
    await first.whole()
    second = await bench.episode.ask(request(user("two")))
    await asyncio.gather(first.delivered(), second.whole())
    numbers = {segment.turn for segment in bench.records.segments()}
    assert numbers == {0, 1} == {entry.number for entry in tree_of(bench.records).turns}
    named: set[int] = set()
    for stored in bench.records.stored:
        for item in stored:
            if isinstance(item, Kept):
                part = TreeSnapshot.decode(item.snapshot.data)
                assert part is not None
                named |= {entry.number for entry in part.turns}
        assert {segment.turn for segment in decoded(stored)} <= named


def decoded(stored: Sequence[Append | Kept]) -> list[Any]:
    return [decode(item.payload) for item in stored if isinstance(item, Append)]


async def test_the_whole_tree_of_an_earlier_release_is_gone_on_from(codec: HermesCodec):
    bench = Bench(codec)
    answer = await bench.ask(user("one"))
    await bench.episode.reward(0.5, token="a", pays=True)
    old = TreeSnapshot([*bench.episode.history.entries.values()], bench.episode.rewards.posted, schema=1)
    assert bench.records.snapshot is not None
    bench.records.snapshot = Snapshot(0, bench.records.snapshot.num_segments, old.encode())
    other = again(bench)
    next_answer = await other.ask(user("one"), said(answer), user("two"))
    await other.episode.reward(1.0, token="b", pays=True)
    assert len(bench.records.snapshot.parts) > 0
    third = again(other)
    assert sorted(third.episode.history.entries) == [0, 1]
    assert third.episode.history.entries[1].parent == 0
    assert [one.token for one in third.episode.rewards.posted] == ["a", "b"]
    await third.ask(user("one"), said(answer), user("two"), said(next_answer), user("three"))
    assert third.counters.get("drift/forks", 0) == 0


async def test_a_turn_of_which_nothing_was_stored_gives_its_number_to_another(codec: HermesCodec):
    bench = Bench(codec, policy=BabblingPolicy(codec, random.Random(0), gate=asyncio.Event()))
    await bench.episode.ask(request(user("one")))
    await bench.episode.reward(0.5, pays=True)  # the turn is kept, and has no tokens yet
    assert [entry.number for entry in tree_of(bench.records).turns] == [0]
    await bench.episode.abandon()
    bench.policy.gate = None
    other = again(bench)
    await other.ask(user("two"))
    (kept,) = tree_of(bench.records).turns
    assert kept == other.episode.history.entries[0]
    assert "turns" in bench.records.calls[1]  # with the first tokens


def test_a_part_that_was_not_stored_comes_again_and_one_that_was_does_not():
    entries = {number: TurnEntry(number, b"r", b"b", b"o", b"t") for number in range(2)}
    parts = TreeParts()
    parts.touch(0)
    assert parts.has_new
    lost = parts.next(entries, (), [], None, finished=False)
    assert parts.has_new
    kept = parts.next(entries, (1,), [StoredReward("", None, 1.0)], StopReason.MAX_TURNS, finished=False)
    assert numbers_in(lost.data) == [0]
    assert numbers_in(kept.data) == [0, 1]
    parts.stored(kept)
    parts.settle(entries)
    entries[1].delivered = True  # while it changes it is looked at each time
    later = parts.next(entries, (1,), [StoredReward("", None, 1.0), StoredReward("", 0, 2.0)], None, finished=True)
    assert numbers_in(later.data) == [1]
    tree = TreeSnapshot.together([kept.data, kept.data, later.data, later.data])
    assert tree is not None
    assert tree.turns == [entries[0], entries[1]]
    assert [one.value for one in tree.rewards] == [1.0, 2.0]
    assert (tree.stopped, tree.finished) == ("", True)


def numbers_in(data: bytes) -> list[int]:
    part = TreeSnapshot.decode(data)
    assert part is not None
    return [entry.number for entry in part.turns]


def test_parts_of_another_kind_or_of_a_later_release_are_not_read():
    good = TreeSnapshot([], [])
    for bad in (TreeSnapshot([], [], schema=3).encode(), TreeSnapshot([], [], kind="world").encode(), b"", b"\xc1"):
        assert TreeSnapshot.together([good.encode(), bad]) is None
    assert TreeSnapshot.together([]) is None


async def test_what_a_replayed_agent_was_refused_is_refused_again_and_counts_once(codec: HermesCodec) -> None:
    bench = Bench(codec)
    for _ in range(2):
        await refused(bench.episode.reward(math.nan, pays=True))
    other = again(bench, begins_again=True)
    counts = []
    for _ in range(3):
        await refused(other.episode.reward(math.nan, pays=True))
        counts.append(other.episode.num_rewards_refused)
    assert counts == [2, 2, 3]
    assert other.setting.counters["rewards/refused"] == 1


@pytest.mark.parametrize("token", ["", "mine"])
async def test_a_reward_that_comes_again_needs_no_room(
    codec: HermesCodec, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    bench = Bench(codec)
    await bench.episode.reward(0.5, token=token, pays=True)
    other = again(bench, begins_again=True)
    monkeypatch.setattr("services.episodes.snapshots.MAX_SNAPSHOT_BYTES", 1)
    await other.episode.reward(0.5, token=token, pays=True)
    assert await refused(other.episode.reward(0.5, token="another", pays=True)) is RefusalKind.OVER_BUDGET
    assert [one.value for one in other.episode.rewards.posted] == [0.5]
