"""The cashbook: what checking and gambling are worth, lessons that are true to it, and a sampler that keeps turns."""

from __future__ import annotations

import asyncio
import random
import statistics
from pathlib import Path

import pytest
import torch

from benchmarks.baselines.cashbook import CHECKED, MISREAD, NOTHING, NUM_AMOUNTS, UNCHECKED, Cashbook
from benchmarks.baselines.cashbook_demonstrations import COURSE, NO_MISTAKES, CashbookMistakes, demonstrate
from benchmarks.baselines.sampler import Answer, DenseSampler, Request, draw
from environments.calculator import evaluate
from examples.demo.model import School
from gspo_core.env import Context, load_environment
from gspo_core.messages import CallStatus, ParsedTurn, ToolCall
from gspo_core.starter.untrained import write_untrained

BOOK = Cashbook.tasks[0]["expression"]


async def _worth(member: int, *, checks: bool, says: str | None = None) -> float:
    """Of an episode that does each step; ``says``: in place of the number that it was shown last."""
    world, context = Cashbook(), Context(f"job/0/{member}", 7, {})
    await world.reset(BOOK, context)
    left = BOOK
    while " " in left:
        with pytest.raises(ValueError, match="next entry is"):
            await world.calculate(" ".join(left.split()[2:5]))
        with pytest.raises(ValueError, match="next entry is"):
            await world.check()
        left = await world.calculate(" ".join(left.split()[:3]))
    if checks:
        left = await world.check()
        assert left == str(evaluate(BOOK))
    await world.on_message(left if says is None else says)
    worth = await world.get_reward(context)
    assert context.metrics == {"num_refused": NUM_AMOUNTS - 1, "is_checked": checks}
    return worth


def test_who_does_not_check_gambles_and_loses_in_the_mean() -> None:
    members = range(200)
    gambled = [asyncio.run(_worth(member, checks=False)) for member in members]
    assert set(gambled) == {0.0, UNCHECKED}, "members of a group have luck of their own"
    assert statistics.fmean(gambled) == pytest.approx((1 - MISREAD) * UNCHECKED, abs=0.1)
    assert statistics.fmean(gambled) < CHECKED < UNCHECKED
    assert {asyncio.run(_worth(member, checks=True)) for member in members[:20]} == {CHECKED}
    assert gambled == [asyncio.run(_worth(member, checks=False)) for member in members], "the same when played again"
    assert asyncio.run(_worth(0, checks=True, says="I give up.")) == NOTHING
    assert asyncio.run(_worth(0, checks=True, says="1")) == 0.0
    # Above the mean of a policy that checks in three episodes of four, it is the gamble that seems to pay.
    mean = (3 * CHECKED + statistics.fmean(gambled)) / 4
    above = statistics.fmean(max(0.0, worth - mean) for worth in gambled)
    assert above > CHECKED - mean


def test_books_are_never_overdrawn_and_none_is_held_out_and_trained() -> None:
    books = [task["expression"] for task in (*Cashbook.tasks, *Cashbook.eval_tasks)]
    assert len(set(books)) == len(books)
    for book in books:
        words = book.split()
        assert len(words) == 2 * NUM_AMOUNTS - 1
        assert all(evaluate(" ".join(words[: 2 * count + 1])) >= 0 for count in range(NUM_AMOUNTS))


def test_lessons_show_what_the_world_answers() -> None:
    generator = random.Random(0)
    for _ in range(20):
        said = demonstrate(BOOK, NO_MISTAKES, generator)
        shown, left = " ".join(BOOK.split()[:3]), BOOK.split()[3:]
        for turn, answer in zip(said[0:-1:2], said[1::2], strict=True):
            [call] = turn["tool_calls"]
            if call["function"]["name"] == "check":
                assert not left
                assert shown.isdecimal()
            else:
                assert turn["content"] == shown
                assert call["function"]["arguments"] == {"expression": shown}
                assert str(answer["content"]).split()[1:] == left[:2]
                left = left[2:]
            shown = str(answer["content"])
        assert said[-1]["content"] == shown
    erring = demonstrate(BOOK, CashbookMistakes(wrong=1.0, gives_up=1.0), generator)
    assert erring[1]["content"] == asyncio.run(_refusal())
    assert BOOK.startswith(str(erring[1]["content"]).rpartition(" is ")[2]), "who reads it can go on"


async def _refusal() -> str:
    session = load_environment("benchmarks.baselines.cashbook:Cashbook").session(episode_id="job/0/0")
    try:
        await session.start({"expression": BOOK}, 7)
        call = ToolCall("calculate", {"expression": "1 + 1"}, CallStatus.OK, "", 0, 1)
        [message] = (await session.act(ParsedTurn("", (call,)))).messages
    finally:
        await session.close()
    return str(message["content"])


def test_a_sampler_that_keeps_what_an_episode_computed_samples_the_same(tmp_path: Path) -> None:
    school = School(tmp_path, 0, COURSE)
    write_untrained(tmp_path, school.codec, 0)
    prompts = [one.token_ids.tolist()[:length] for one, length in zip(school.practice(3), (90, 95, 120), strict=True)]
    keeping, forgetting = DenseSampler(tmp_path, 512, num_kept=2), DenseSampler(tmp_path, 512)
    for one in (keeping, forgetting):
        one.add(0, tmp_path)
    asked = [Request(ids, 5 + place, place, 0) for place, ids in enumerate(prompts)]
    for turn in range(3):
        found, expected = (one.generate(0, asked, school.codec.stop_ids) for one in (keeping, forgetting))
        assert [answer.ids for answer in found] == [answer.ids for answer in expected]
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.logprobs == pytest.approx(theirs.logprobs, abs=2e-5)
        assert len(keeping._kept) == 2
        # The next turn reads an answer of another length, and one of the episodes is over.
        asked = [
            Request([*one.ids, *answer.ids, *prompts[0][: 3 + turn]], 6, one.seed, one.num_drawn + len(answer.ids))
            for one, answer in zip(asked, found, strict=True)
        ][: 3 - turn]


def test_a_sampler_recalls_only_what_the_same_weights_computed_of_the_same_tokens(tmp_path: Path) -> None:
    school = School(tmp_path / "0", 0, COURSE)
    for seed in (0, 1):
        (tmp_path / str(seed)).mkdir(exist_ok=True)
        write_untrained(tmp_path / str(seed), school.codec, seed)
    keeping, forgetting = DenseSampler(tmp_path / "0", 512, num_kept=2), DenseSampler(tmp_path / "0", 512)
    for one in (keeping, forgetting):
        for version in (0, 1):
            one.add(version, tmp_path / str(version))
    first, other, *_ = (one.token_ids.tolist()[:90] for one in school.practice(3))
    assert first != other
    [answer] = keeping.generate(0, [Request(first, 5, 7, 0)], school.codec.stop_ids)
    forgetting.generate(0, [Request(first, 5, 7, 0)], school.codec.stop_ids)
    longer = [*first, *answer.ids, *other[:3]]
    for version, ids in ((1, longer), (0, [*other, *longer[90:]]), (0, longer[:80])):
        kept = dict(keeping._kept)
        [mine], [theirs] = (
            one.generate(version, [Request(ids, 5, 7, 5)], school.codec.stop_ids) for one in (keeping, forgetting)
        )
        assert mine.ids == theirs.ids
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=2e-5)
        keeping._kept.clear()
        keeping._kept.update(kept)


def test_a_cooler_sampler_records_the_log_probs_that_it_drew_by() -> None:
    logits_BV = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    requests = [Request([1], 1, 7, 0, temperature) for temperature in (1.0, 0.6)]
    answers = [Answer([], []) for _ in requests]
    draw(logits_BV, requests, answers)
    for logits_V, request, answer in zip(logits_BV, requests, answers, strict=True):
        expected_V = torch.log_softmax(logits_V / request.temperature, dim=-1)
        assert answer.logprobs == pytest.approx([float(expected_V[answer.ids[0]])], abs=1e-6)
