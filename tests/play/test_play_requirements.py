"""Plays of the gateway's requirements in small: what is drawn, and what is taken for a fault. No stack is started."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from services.gateway.dialects.turns import Refusal
from services.gateway.http.app import DIALECTS as READERS
from tests.core.qwen_vocabulary import qwen_vocabulary_or_skip
from tests.play.requirements import asking, search, speaker
from tests.play.requirements.asking import Answered
from tests.play.requirements.branches import SITUATIONS, Shared, Thread, cached_due, in_branches, read_again, reason_due
from tests.play.requirements.doors import Asked, late
from tests.play.requirements.field_cases import ACTED, TABLES, TOLD, UNKNOWN, Case, cases, judged, without_index
from tests.play.requirements.fields import put
from tests.play.requirements.figures import KEPT, PAGE, Figure, kept
from tests.play.requirements.posts import (
    COMMAND,
    FIELD,
    FUNCTION,
    PATH,
    SERVICE,
    TURN,
    WAYS,
    WORDS,
    Post,
    due,
    paths_of,
    posts_of,
)
from tests.play.requirements.privacy import entered_due
from tests.play.requirements.redactor import REDACTED, redact
from tests.play.requirements.search import FILES, LOGS, REDIS_FILES, Search, digits_of, in_files, in_redis, mark
from tests.play.requirements.whole_bodies import WHOLE, objects_at
from tests.play.requirements.wire import spans_of, streamed, tile
from tests.play.run import qwen_codec

READER_OF = dict(zip(asking.DIALECTS, READERS.values(), strict=True))


def task(way: str = FUNCTION, word: str = "", number: int = 0, *, judges: bool = False) -> dict[str, Any]:
    return {"seed": 1, "what": f"{way} {word}", "number": number, "way": way, "word": word, "judges": judges}


# 2: rewards


@pytest.mark.parametrize("word", WORDS)
def test_a_reward_is_what_the_word_of_its_job_says(word: str) -> None:
    for way in WAYS:
        for number in range(40):
            given = task(way, word, number, judges=word == "judge")
            drawn, found = posts_of(given), due(given)
            assert len(found.statuses) == len(drawn.posts)
            assert 0 <= found.reward <= 1
            if word in ("returned", "judge"):
                assert found.reward == (drawn.judged if word == "judge" else drawn.returned)
                assert 200 not in found.statuses
            if word != "posted":  # whatever it tries
                own = [status for post, status in zip(drawn.posts, found.statuses, strict=True) if post.by_own_key]
                assert 200 not in own


def test_what_is_outside_the_range_is_never_due() -> None:
    tried = 0
    for number in range(100):
        given = task(SERVICE, "posted", number)
        for post, status in zip(posts_of(given).posts, due(given).statuses, strict=True):
            if not 0 <= post.value <= 1:
                tried += 1
                assert status != 200
    assert tried > 50


def test_a_program_has_the_key_that_samples_alone() -> None:
    assert all(post.by_own_key for number in range(40) for post in posts_of(task(COMMAND, "", number)).posts)


def test_rewards_are_tried_as_fields_and_at_other_paths_too() -> None:
    assert paths_of(Post(True, TURN, 0.9, "x-api-key", 1), ["a", "b"])[1] == {"reward": 0.9, "turn": "b"}
    path, said = paths_of(Post(True, FIELD, 0.9, "x-api-key", 0), [])
    assert (path, said["reward"]) == (asking.PATHS[asking.CHAT], 0.9)
    assert paths_of(Post(True, PATH, 0.9, "x-api-key", 0), [])[0].endswith("rewards")


# 3: fields


@pytest.mark.parametrize("dialect", asking.DIALECTS)
def test_a_whole_body_holds_every_place_of_the_table_and_is_taken(dialect: str) -> None:
    drawn = [WHOLE[dialect](random.Random(seed)) for seed in range(8)]
    for place in TABLES[dialect]:
        assert any(objects_at(one, place) for one in drawn), place
    for one in drawn:
        assert not READER_OF[dialect].read(one, {}).unsupported


@pytest.mark.parametrize("dialect", asking.DIALECTS)
def test_each_field_of_the_table_is_a_case_and_ends_as_it_may(dialect: str) -> None:
    found = [*cases(dialect, random.Random(3))]
    assert {(one.place, one.name) for one in found if one.kind != UNKNOWN} == {
        (place, name) for place, rules in TABLES[dialect].items() for name in rules
    }
    assert [judged(one, read(one, says=says))[1] for one in found for says in (False, True)] == [""] * (2 * len(found))


def read(case: Case, *, says: bool) -> Answered:
    """As the gateway answers, without one."""
    try:
        question = READER_OF[case.dialect].read(case.asked, {})
    except Refusal as refusal:
        return Answered(400, fault=refusal.message)
    if question.unsupported and not says:
        return Answered(400, fault=question.unsupported[0].message)
    return Answered(200, ignored=(*question.ignored, *(without_index(one.param) for one in question.unsupported)))


def test_silence_and_any_other_end_are_faults() -> None:
    case = Case(asking.CHAT, "messages[]", "audio", TOLD, {})
    assert judged(case, Answered(200)) == ("passed over", "it is answered, and the field is not named")
    assert judged(case, Answered(200, ignored=("messages.audio",))) == ("said", "")
    assert judged(case, Answered(400, fault="messages[3].audio cannot be")) == ("refused by name", "")
    assert judged(case, Answered(400, fault="bad request"))[0] == "something else"
    assert judged(case, Answered(500, fault="messages[3].audio"))[0] == "something else"
    acted = Case(asking.CHAT, "", "seed", ACTED, {})
    assert judged(acted, Answered(200)) == (ACTED, "")
    assert judged(acted, Answered(400, fault="seed must be"))[1]


def test_a_field_is_put_at_its_path() -> None:
    assert put({"a": {"b": 1}, "c": 2}, "a.d", 3) == {"a": {"b": 1, "d": 3}, "c": 2}
    assert put({}, "a", 3) == {"a": 3}


# 4: branches


def test_tokens_that_were_read_again_are_counted_behind_what_is_shared() -> None:
    columns = {"id": [1, 2, 3, 1, 2, 9, 4], "branch": [0, 0, 0, 1, 1, 1, 1], "sampled": [0, 0, 1, 0, 0, 0, 1]}
    found = in_branches(columns)
    assert found == {0: Shared([1, 2, 3], 2), 1: Shared([1, 2, 9, 4], 3)}
    assert read_again(found[1], [found[0]]) == (2, 1)
    assert read_again(found[1], []) == (0, 3)


def test_what_is_due_of_a_branch() -> None:
    answers = [Answered(200, prompt=10, sampled=3), Answered(200, text="few words", prompt=20, sampled=5)]
    thread, third = Thread("be", ("a", "b"), answers), Answered(200, prompt=40)
    due_cached = {name: cached_due(one, thread, third) for name, one in SITUATIONS.items()}
    assert due_cached["it goes on"] == 25
    assert due_cached["it goes on from an earlier turn"] == 13
    assert due_cached["another sample of the same request"] == 40
    assert due_cached["an old message is edited"] == due_cached["a tool more"] == 0
    assert reason_due(SITUATIONS["a summary in place of all"], thread) == "sub_agent"
    longer = Thread("be", ("a", "b"), [answers[0], Answered(200, text="words " * 9)])
    assert reason_due(SITUATIONS["a summary in place of all"], longer) == "compacted"


# 9: the wire


def test_spans_tile_what_was_sampled_or_a_fault_says_where_not() -> None:
    assert not tile([(0, 2, 7), (2, 5, 8)], 5)
    assert not tile([], 0)
    assert tile([(0, 2, 7), (3, 5, 8)], 5) == "a span from 3 to 5 behind 2"
    assert tile([(0, 2, 7)], 5) == "2 of 5 tokens have a version"
    columns = {"turn": [0, 0, 1, 1, 1], "sampled": [0, 1, 1, 1, 1], "version": [3, 3, 3, 4, 4]}
    assert spans_of(columns, 1) == ((0, 1, 3), (1, 3, 4))


def test_the_end_of_a_stream_tells_what_a_whole_answer_does() -> None:
    usage = {"input_tokens": 4, "cache_read_input_tokens": 6, "output_tokens": 2}
    told: list[dict[str, Any]] = [
        {"type": "message_start", "message": {"id": "turn-0-1", "usage": usage | {"output_tokens": 0}}},
        {"type": "message_delta", "usage": usage, "policy_version": [{"start": 0, "end": 2, "version": 5}]},
    ]
    found = streamed(asking.MESSAGES, told)
    assert (found.turn, found.prompt, found.cached, found.sampled, found.versions) == (1, 10, 6, 2, ((0, 2, 5),))


# 10: privacy


def a_search() -> Search:
    return Search(range(15, 25))


def as_ids(text: bytes) -> bytes:
    return b"".join((15 + int(chr(digit))).to_bytes(4, "little") for digit in text)


def test_marks_are_found_as_text_and_as_ids_and_keys_as_such() -> None:
    one, other = (mark(random.Random(seed), search.OPEN) for seed in range(2))
    ids = b"\x01" + (9).to_bytes(4, "little") + as_ids(digits_of(other)) + (220).to_bytes(4, "little")
    key, talk = b"ep_" + b"aZ-_9" * 20, b"tk_job_01m8nn.a1b2c3." + b"q" * 43
    found = a_search().of(b"..." + one.encode() + b'"k' + key + b'"' + ids + b"=" + talk + b"\n")
    assert found.marks == {digits_of(one), digits_of(other)}
    assert found.keys == {key, talk}
    assert not a_search().of(redact(f"a secret-{'7' * 16} text").encode()).marks
    assert redact("a secret-77 text") == f"a {REDACTED} text"


def test_a_search_of_redis_reads_every_key_by_its_type() -> None:
    marks = [mark(random.Random(seed), search.USER) for seed in range(7)]
    text = [one.encode() for one in marks]
    kept = {
        b"a": ("string", text[0]),
        b"b": ("hash", {b"x": text[1]}),
        b"c": ("list", [text[2]]),
        b"d": ("set", {text[3]}),
        b"e": ("zset", [(text[4], 1.0)]),
        b"f": ("stream", [(b"1-0", {b"d": text[5]})]),
        text[6]: ("string", b""),
    }

    def command(name: str, *given: Any) -> Any:
        if name == "SCAN":
            return (0, [*kept]) if given[0] else (7, [*kept][:3])
        kind, value = kept[given[0]]
        return kind if name == "TYPE" else value

    found, types = in_redis(a_search(), command)
    assert found.marks == {digits_of(one) for one in marks}
    assert types == Counter(string=2, hash=1, list=1, set=1, zset=1, stream=1)


def test_files_are_searched_by_what_they_are(tmp_path: Path) -> None:
    marks = {place: mark(random.Random(place), search.OPEN) for place in (LOGS, FILES, REDIS_FILES, "weights")}
    names = {LOGS: "logs/api.log", FILES: "jobs/j/batches/b", REDIS_FILES: "redis/a.aof", "weights": "m.safetensors"}
    for place, name in names.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(marks[place])
    found = in_files(a_search(), tmp_path)
    assert {place: one.marks for place, one in found.items()} == {
        place: {digits_of(marks[place])} for place in (LOGS, FILES, REDIS_FILES)
    }


def test_steps_behind_the_newest_checkpoint_are_not_erased_yet() -> None:
    rows = [("j/0/0", 1), ("j/3/1", 4)]
    assert entered_due(rows, 2) == ({("j/0/0", 1)}, {("j/3/1", 4)})


# what is told


def test_a_figure_counts_its_faults_and_a_page_has_them(tmp_path: Path) -> None:
    figure = Figure(4, "branches", "played | twice", held="1 of 2")
    figure.count("episodes", 2)
    figure.largest("s", 0.25)
    for what in ("said", "said", "refused"):
        figure.count_part("chat", what)
    for _ in range(2):
        figure.expect(False, "the `reason` is x")
    assert figure.expect(True, "never")
    (tmp_path / KEPT).parent.mkdir(parents=True)
    common = {"seed": 5, "commit": "0123", "date": "2026-11-30", "python": "3.11", "cores": 2, "load": [1.0, 2.0]}
    kept({**common, "seconds": 60, "figures": [figure.as_json()]}, tmp_path)
    text = (tmp_path / PAGE).read_text()
    assert "| 4 branches | played \\| twice | episodes: 2; s: 0.250 | 1 of 2 | 2 |" in text
    assert "|  | said | refused |\n|---|---|---|\n| chat | 2 | 1 |" in text
    assert "- 4, 2 times: `the 'reason' is x`" in text
    assert "Seed 5, commit 0123" in text


def test_the_model_says_words_and_ends_calls_that_are_begun() -> None:
    qwen_vocabulary_or_skip()
    codec = qwen_codec()
    said = (*speaker.WORDS, *speaker.CALL)
    assert len({speaker.token_of(codec, one) for one in said}) == len(said)
    opening = codec.call_opening("lookup")
    assert opening is not None
    assert opening[-1] == speaker.token_of(codec, speaker.CALL[0])
    rest = [speaker.token_of(codec, one) for one in speaker.CALL[1:]]
    (call,) = codec.parse([*opening, *rest, codec.stop_ids[0]]).calls
    assert (call.name, call.arguments) == ("lookup", {})


# 8: doors


def test_what_is_begun_behind_a_revocation_and_answered_is_late() -> None:
    asked = [Asked(1.0, 200, 2.0), Asked(2.0, 200, 3.0), Asked(3.0, 401, 3.1)]
    assert (late(asked, 0.5), late(asked, 1.5), late(asked, 2.5)) == (2, 1, 0)
