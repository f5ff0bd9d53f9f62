"""What is told of an episode that was given up is what Redis was told."""

from __future__ import annotations

from typing import Any

import msgspec

from tests.chaos.deaths import deaths_without_progress, given_up

KEY = b"gspo:{job_1}:episodes"


def command(*args: bytes) -> bytes:
    return b"*%d\r\n" % len(args) + b"".join(b"$%d\r\n%s\r\n" % (len(one), one) for one in args)


def written(episode: bytes, *counts: int, **more: Any) -> bytes:
    state = dict(zip(("segments", "furthest", "deaths", "failures"), counts, strict=True)) | more
    return command(b"HSET", KEY, episode, msgspec.msgpack.encode(state))


def test_an_episode_that_was_given_up_is_told_with_its_deaths() -> None:
    log = b"".join(
        (
            command(b"SELECT", b"0"),
            b"#TS:1795536650\r\n",
            written(b"0:1", 2, 2, 1, 0),
            written(b"0:2", 1, 0, 0, 0),
            command(b"HSET", b"gspo:{job_1}:meta", b"dead_letters", b"1"),
            written(b"0:1", 2, 2, 3, 2),
            written(b"0:1", 2, 2, 3, 3, dead=True),
        )
    )
    found = given_up(log)
    assert found == {(KEY.decode(), "0:1"): [(2, 2, 1, 0), (2, 2, 3, 2), (2, 2, 3, 3)]}
    assert deaths_without_progress(found[KEY.decode(), "0:1"]) == 6
