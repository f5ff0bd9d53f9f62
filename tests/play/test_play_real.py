"""Real plays in small: what the model is taught, who plays when, and what the judge takes for a fault."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse
from starlette.routing import Route

from gspo_core.types import Asked, EpisodeKey, Outcome, Segment, StopReason, Trajectory
from tests.core.qwen_vocabulary import qwen_vocabulary_or_skip
from tests.play.real.agent import NAMES
from tests.play.real.judged import Verdict, caused, not_sampled, not_trained_once, stored
from tests.play.real.page import GENERATION, Row, counted, page, row_of, shortened
from tests.play.real.passage import Passage, Samples
from tests.play.real.speech import CALLER, PACKAGE, TITLES, TOOLS, Speech, tongue_of
from tests.play.real.world import rota
from tests.play.run import qwen_codec

LABEL = "job/1/4"


def segment(index: int, ids: list[int], acts: list[int], version: int = 4, **fields: Any) -> Segment:
    mask = np.array(acts, np.bool_)
    given: dict[str, Any] = {"branch": 0, "turn": index, "engine_id": "e", "temperature": 1.0, "attempt": 0}
    return Segment(
        key=EpisodeKey("job", 0, 0),
        index=index,
        version=version,
        token_ids=np.array(ids, np.int32),
        action_mask=mask,
        behavior_logprobs=np.where(mask, -np.array(ids, np.float32), 0).astype(np.float32),
        **(given | fields),
    )


def two_turns() -> list[Segment]:
    return [
        segment(0, [1, 2, 30, 31], [0, 0, 1, 1]),
        segment(1, [5, 32], [0, 1], asked=Asked(0, "", "chat", "policy", 3, 2)),
        segment(2, [], [], turn=1, outcome=Outcome(StopReason.COMPLETED, 1.0)),
    ]


def sampled(prompt: list[int], ids: list[int], label: str = LABEL) -> tuple[bytes, bytes]:
    meta = {
        "output_token_logprobs": [[-float(one), one, None] for one in ids],
        "weight_versions": [{"version": label, "start": 0, "end": len(ids)}],
    }
    return json.dumps({"input_ids": prompt}).encode(), json.dumps({"output_ids": ids, "meta_info": meta}).encode()


def engine(*answers: tuple[bytes, bytes]) -> Samples:
    samples = Samples()
    for asked, answered in answers:
        samples.read("/generate", asked, answered)
    return samples


FIRST, SECOND = sampled([1, 2], [30, 31]), sampled([1, 2, 30, 31, 5], [32])


def test_what_is_stored_was_sampled_behind_the_stored_ids_in_one_piece_or_in_several() -> None:
    branches = stored(two_turns())
    assert not [*not_sampled(branches, engine(FIRST, SECOND), [])]
    pieces = sampled([1, 2], [30]), sampled([1, 2, 30], [31, 99]), SECOND  # behind its end a turn is not stored
    assert not [*not_sampled(branches, engine(*pieces), [])]


@pytest.mark.parametrize(
    "answer",
    [
        sampled([1, 3], [30, 31]),
        sampled([1, 2], [30, 33]),
        sampled([1, 2], [30, 31], "job/1/5"),
    ],
    ids=["behind other ids", "another id", "another version"],
)
def test_what_the_engine_did_not_say_so_is_a_fault(answer: tuple[bytes, bytes]) -> None:
    assert len([*not_sampled(stored(two_turns()), engine(answer, SECOND), [])]) == 1


def test_another_log_prob_is_a_fault() -> None:
    asked, answered = FIRST
    other = asked, answered.replace(b"-31.0", b"-31.00001")
    assert [*not_sampled(stored(two_turns()), engine(other, SECOND), [])]


def test_a_turn_is_trained_in_one_branch() -> None:
    record = two_turns()
    assert not [*not_trained_once(Trajectory(tuple(record)), stored(record))]
    again = [*record[:2], segment(2, [1, 2, 30], [0, 0, 1], branch=1, turn=0)]
    again.append(segment(3, [], [], turn=1, outcome=Outcome(StopReason.COMPLETED, 1.0)))
    assert [*not_trained_once(Trajectory(tuple(again)), stored(again))]
    rejected = [*record[:2], segment(2, [], [], outcome=Outcome(StopReason.COMPLETED, 1.0), untrained_turns=(0,))]
    (found,) = not_trained_once(Trajectory(tuple(rejected)), stored(rejected))
    assert "go on from" in found


@pytest.mark.parametrize(("again", "number"), [(30, 0), (40, 1)])
def test_of_two_equal_samples_each_is_gone_on_from_once_without_a_branch(again: int, number: int) -> None:
    """Turns 0 and 1 are samples of one request; 2 goes on from the one, and 3 with other words from the other."""

    def turn(index: int, said: list[int], acts: list[int], number: int, parent: int | None, **fields: Any) -> Segment:
        what = Asked(parent, "", "chat", "policy", 3, 2)
        return segment(index, said, acts, turn=number, branch=number % 2, asked=what, **fields)

    record = [
        turn(0, [1, 2, 30, 31], [0, 0, 1, 1], 0, None),
        turn(1, [1, 2, again, 31], [0, 0, 1, 1], 1, None),
        turn(2, [5, 32], [0, 1], 2, 0),
        turn(3, [6, 32], [0, 1], 3, 1),
    ]
    asked = {one.turn: one.asked for one in record if one.asked is not None}
    found = caused({"resampled": 1, "edited_history": 1}, stored(record), asked)
    assert found == Counter(resampled=1, edited_history=number)


def test_harnesses_come_in_turn() -> None:
    tasks = rota({"a": 2, "b": 4})
    assert [one["harness"] for one in tasks[:3]] == ["b", "a", "b"]
    assert Counter(one["harness"] for one in tasks) == {"a": 2, "b": 4}
    assert {(one["harness"], one["number"]) for one in tasks} == {("a", 0), ("a", 1)} | {("b", n) for n in range(4)}


def test_a_prompt_tells_which_tools_there_are() -> None:
    signs = {"Qwen Code": "is_background", "mini-swe-agent": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}
    for name, tool in TOOLS.items():
        assert tongue_of(f'{{"name": "{tool}", "{signs.get(name, "")}": 1}}') == name
    assert tongue_of('{"name": "lookup"} {"name": "final_answer"}') == CALLER
    assert tongue_of('{"name": "lookup"}') == PACKAGE
    assert tongue_of("Title of this?") == TITLES


def test_what_is_taught_are_mostly_calls_of_the_tools_that_there_are() -> None:
    qwen_vocabulary_or_skip()
    codec, rng = qwen_codec(), random.Random(0)
    speech = Speech(codec)
    for name, tool in TOOLS.items():
        turns = [codec.parse(speech.turn([1], name, rng)) for _ in range(60)]
        called = [call.name for turn in turns for call in turn.calls]
        assert called.count(tool) > 30
        assert set(called) <= {tool, "no_such_tool"}
    forced = speech.turn([1, *codec.call_opening("lookup")], PACKAGE, rng)
    (call,) = codec.parse([*codec.call_opening("lookup"), *forced]).calls
    assert call.name == "lookup"
    assert isinstance(call.arguments, dict)


def test_what_passes_is_read_and_not_changed() -> None:
    async def echo(request: HttpRequest) -> JSONResponse:
        body = await request.json()
        return JSONResponse({"got": body, "of": request.url.query}, headers={"x-kept": "yes"})

    read: list[tuple[str, bytes, bytes]] = []

    async def ask() -> httpx.Response:
        behind = httpx.ASGITransport(Starlette(routes=[Route("/v1/x", echo, methods=["POST"])]))
        async with httpx.AsyncClient(transport=behind) as client:
            passage = Passage(client, lambda: "http://behind", lambda *heard: read.append(heard))
            async with httpx.AsyncClient(transport=httpx.ASGITransport(passage), base_url="http://here") as outer:
                return await outer.post("/v1/x?a=b", json=["Größe"])

    answer = asyncio.run(ask())
    assert answer.json() == {"got": ["Größe"], "of": "a=b"}
    assert answer.headers["x-kept"] == "yes"
    assert [(path, body) for path, _, body in read] == [("/v1/x", answer.content)]


def test_a_row_adds_up_its_episodes() -> None:
    one = Verdict("Codex", 3, 90, 80, 1, 2, Counter(sub_agent=1), Counter(), 8000, 8600)
    two = Verdict("Codex", 2, 60, 60, 0, 1, Counter(), Counter({"n must be 1": 2}), 7000, 7500, faults=["wrong"])
    row = row_of("Codex", "codex@1", [one, two], ["status 1: a\nits last line"], [2.0, 3.0])
    assert (row["episodes"], row["turns"], row["tokens"], row["versions"], row["mixed"]) == (2, 5, 150, 2, 1)
    assert (row["branches"], row["refused"]) == ({"sub_agent": 1}, {"n must be 1": 2})
    assert (row["shortest"], row["longest"], row["seconds"]) == (7000, 8600, 2.5)
    assert (row["faults"], row["ended_otherwise"]) == (["wrong"], {"status 1: its last line": 1})
    assert shortened("it has not ended in 600 s") == "it has not ended in 600 s"


def a_run(seed: int, rows: list[Row], **changes: Any) -> dict[str, Any]:
    computed = {"equal": 5, "tokens": 5, "versions": 1, "largest": 1e-6, "other_tokens": 0, "other_equal": 0}
    told = {"date": "2026-11-27", "cores": 2, "load": [1.0, 2.0], "steps": 3, "seconds": 60, "status": "succeeded"}
    common = {"seed": seed, "commit": "0123abcdef", "generation": GENERATION, "computed": computed, **told}
    return {**common, **changes, "rows": rows}


def test_episodes_of_several_runs_add_up_where_they_were_played_and_judged_alike() -> None:
    one = Verdict("openai", 3, 90, 80, 1, 2, Counter(sub_agent=1), Counter(), 200, 300, faults=["a | fault"])
    row = row_of("openai", "openai 3", [one], [], [2.0])
    newer = row_of("openai", "openai 4", [one, one], [], [2.0])
    runs = [a_run(1, [row]), a_run(2, [row, newer]), a_run(3, [row], commit="0-dirty"), a_run(4, [row], generation=0)]
    found = [(one["version"], one["episodes"], one["branches"], one["faults"]) for one in counted(runs)]
    assert found == [
        ("openai 3", 2, {"sub_agent": 2}, ["a | fault"] * 2),
        ("openai 4", 2, {"sub_agent": 2}, ["a | fault"] * 2),
    ]
    text = page(runs)
    assert "| openai 3 | 2 | 6 | 180 | sub_agent 2 | none | 0 | 2 | 2 |" in text
    assert [line for line in text.splitlines() if line.startswith("## Seed")] == [
        *("## Seed 1 \\*", "## Seed 2 \\*", "## Seed 3", "## Seed 4")
    ]
    assert "- openai: `a | fault`" in text


def test_a_harness_plays_in_one_way() -> None:
    assert len(NAMES) == 14
    assert not [name for name in NAMES if "ACP" in name]
