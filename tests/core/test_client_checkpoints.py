"""Exports that the client fetches: over connections that break, of files that change, and never out of their folder."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_core.client import ApiError, Client
from gspo_core.client_fetching import TRIES, ExportIncomplete

ID = "job_1/1/20"
WEIGHTS = bytes(range(256)) * 40


class Breaking(httpx.SyncByteStream):
    """Gives ``content`` in pieces, and breaks after so many bytes; or only ends there, as behind some proxies."""

    def __init__(self, content: bytes, at: int | None, is_quiet: bool = False) -> None:
        self._content, self._at, self._is_quiet = content, at, is_quiet

    def __iter__(self) -> Iterator[bytes]:
        content = self._content if self._at is None else self._content[: self._at]
        for start in range(0, len(content), 1000):
            yield content[start : start + 1000]
        if self._at is not None and not self._is_quiet:
            raise httpx.ReadError("the connection broke")


class Installation:
    """Answers the n-th download from the n-th of ``contents`` and breaks it there (the last of both goes on)."""

    def __init__(
        self,
        contents: Sequence[bytes],
        breaks: Sequence[int | None],
        *,
        listed: Sequence[str] = ("model.safetensors",),
        is_quiet: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._contents, self._breaks, self._is_quiet = contents, breaks, is_quiet
        self._headers = headers or {}
        self.ranges: list[str | None] = []
        """What was asked for as a range."""
        self.export: dict[str, Any] = {
            "status": "ready",
            "path": "jobs/job_1/exports/ep000001-step000020",
            "message": None,
            "files": [{"path": path, "size_bytes": len(contents[-1])} for path in listed],
            "written_at": "2026-11-30T12:00:00+00:00",
        }

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if "/export/files/" not in request.url.path:
            return httpx.Response(200, text=json.dumps({"id": ID, "files": [], "export": self.export}))
        number = len(self.ranges)
        content = self._contents[min(number, len(self._contents) - 1)]
        tag, asked = f'"{hash(content)}"', request.headers.get("range")
        self.ranges.append(asked)
        start = int(re.sub(r"\D", "", asked)) if asked and request.headers["if-range"] == tag else 0
        headers = {"ETag": tag} | (
            {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"} if start else {}
        )
        stream = Breaking(content[start:], self._breaks[min(number, len(self._breaks) - 1)], self._is_quiet)
        return httpx.Response(206 if start else 200, headers=headers | dict(self._headers), stream=stream)


def fetched(answer: Callable[[httpx.Request], httpx.Response], to: Path, slept: list[float] | None = None) -> Path:
    slept = [] if slept is None else slept
    with Client("http://there", transport=httpx.MockTransport(answer), sleep=slept.append) as client:
        return client.fetch_export(ID, to)


def refusing(
    answer: Installation, status: int, code: str, *, after: int, **headers: str
) -> Callable[..., httpx.Response]:
    """Refuses downloads after so many."""

    def refuse(request: httpx.Request) -> httpx.Response:
        if "/export/files/" not in request.url.path or len(answer.ranges) < after:
            return answer(request)
        answer.ranges.append("refused")
        return httpx.Response(status, headers=headers, json={"error": {"code": code, "message": "not now"}})

    return refuse


@pytest.mark.parametrize("is_quiet", [False, True])
@given(st.lists(st.integers(1, 4000), max_size=6))
def test_what_breaks_is_gone_on_with(
    tmp_path_factory: pytest.TempPathFactory, is_quiet: bool, lengths: list[int]
) -> None:
    to = tmp_path_factory.mktemp("fetched") / "model"
    answer = Installation([WEIGHTS], [*lengths, None], is_quiet=is_quiet)
    assert (fetched(answer, to) / "model.safetensors").read_bytes() == WEIGHTS
    at, expected = 0, [None]
    for length in lengths:
        at += min(length, len(WEIGHTS) - at)
        if at == len(WEIGHTS):
            break
        expected.append(f"bytes={at}-")
    assert answer.ranges == expected


def test_a_file_that_is_another_one_meanwhile_is_fetched_from_its_beginning(tmp_path: Path) -> None:
    answer = Installation([WEIGHTS, WEIGHTS[::-1]], [3000, None])
    assert (fetched(answer, tmp_path / "model") / "model.safetensors").read_bytes() == WEIGHTS[::-1]
    assert answer.ranges == [None, "bytes=3000-"]


def test_files_of_two_exports_are_no_model(tmp_path: Path) -> None:
    """It was removed and written again meanwhile: each file is whole, and they do not belong together."""
    answer = Installation([WEIGHTS], [None])

    def written_again(request: httpx.Request) -> httpx.Response:
        given = answer(request)
        if answer.ranges:
            answer.export = {**answer.export, "written_at": "2026-11-30T12:05:00+00:00"}
        return given

    with pytest.raises(ExportIncomplete, match="another one by now: fetch it again"):
        fetched(written_again, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_quiet", [False, True])
def test_a_connection_that_gives_nothing_more_is_given_up_and_leaves_nothing(tmp_path: Path, is_quiet: bool) -> None:
    slept: list[float] = []
    answer = Installation([WEIGHTS], [3000, 0], is_quiet=is_quiet)
    with pytest.raises(ExportIncomplete, match=r"model\.safetensors broke off after 3000 of 10240 bytes, and 8 more"):
        fetched(answer, tmp_path / "model", slept)
    assert (len(answer.ranges), len(slept)) == (TRIES + 1, TRIES)
    assert list(tmp_path.iterdir()) == []


def test_one_who_always_begins_anew_and_never_comes_further_is_given_up(tmp_path: Path) -> None:
    answer = Installation([WEIGHTS, WEIGHTS[::-1]] * TRIES, [5000, 3000] * TRIES)
    with pytest.raises(ExportIncomplete, match="broke off after"):
        fetched(answer, tmp_path / "model")
    assert len(answer.ranges) == TRIES + 1
    assert list(tmp_path.iterdir()) == []


def test_a_long_name_of_a_directory_is_as_good_as_a_short_one(tmp_path: Path) -> None:
    to = tmp_path / ("\N{OX}" * 63)
    assert (fetched(Installation([WEIGHTS], [None]), to) / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize("size", [0, len(WEIGHTS)])
def test_a_refusal_is_not_repeated_and_an_empty_file_does_not_hide_it(tmp_path: Path, size: int) -> None:
    answer = Installation([WEIGHTS[:size]], [None])
    with pytest.raises(ApiError, match="not now") as refused:
        fetched(refusing(answer, 404, "export_file_not_found", after=0), tmp_path / "model")
    assert (refused.value.code, answer.ranges) == ("export_file_not_found", ["refused"])
    assert list(tmp_path.iterdir()) == []


def test_an_empty_file_is_fetched(tmp_path: Path) -> None:
    assert (fetched(Installation([b""], [None]), tmp_path / "model") / "model.safetensors").read_bytes() == b""


def test_one_who_is_asked_to_come_again_later_does(tmp_path: Path) -> None:
    slept: list[float] = []
    answer = Installation([WEIGHTS], [3000])
    refuse = refusing(answer, 503, "too_many_streams", after=1, **{"Retry-After": "3"})
    with pytest.raises(ApiError, match="not now"):
        fetched(refuse, tmp_path / "model", slept)
    assert answer.ranges == [None, *TRIES * ["refused"]]
    assert slept == [0.5, *(TRIES - 1) * [8.0]]


def test_what_is_there_stays(tmp_path: Path) -> None:
    answer = Installation([WEIGHTS], [None])
    (tmp_path / "model").mkdir()
    (tmp_path / "leads_nowhere").symlink_to(tmp_path / "nowhere")
    for name in ("model", "leads_nowhere"):
        with pytest.raises(FileExistsError):
            fetched(answer, tmp_path / name)
    assert answer.ranges == []
    assert {one.name for one in tmp_path.iterdir()} == {"model", "leads_nowhere"}


def test_what_was_fetched_stays_where_its_name_was_taken_meanwhile(tmp_path: Path) -> None:
    answer = Installation([WEIGHTS], [None])

    with (
        Client("http://there", transport=httpx.MockTransport(answer)) as client,
        pytest.raises(ExportIncomplete, match="all of it was fetched and lies in ") as told,
    ):
        client.fetch_export(ID, tmp_path / "model", lambda file, done: (tmp_path / "model").touch())
    [beside] = [one for one in tmp_path.iterdir() if one.name != "model"]
    assert str(beside) in str(told.value)
    assert (beside / "model.safetensors").read_bytes() == WEIGHTS


def test_a_file_of_another_size_does_not_count(tmp_path: Path) -> None:
    answer = Installation([WEIGHTS[:-1]], [None], headers={"Content-Length": "10239"})
    answer.export["files"][0]["size_bytes"] = 10240
    with pytest.raises(ExportIncomplete, match="has 10239 bytes, and was announced with 10240"):
        fetched(answer, tmp_path / "short")
    longer = Installation([WEIGHTS + b"more", WEIGHTS], [None])
    with pytest.raises(ExportIncomplete, match="has 10244 bytes, and was announced with 10240"):
        fetched(longer, tmp_path / "long")
    assert list(tmp_path.iterdir()) == []


def test_an_answer_without_an_end_does_not_fill_the_disk(tmp_path: Path) -> None:
    answer = Installation([WEIGHTS], [None])
    given: list[int] = []

    def endless(request: httpx.Request) -> httpx.Response:
        if "/export/files/" not in request.url.path:
            return answer(request)

        class Endless(httpx.SyncByteStream):
            def __iter__(self) -> Iterator[bytes]:
                while len(given) < 1000:
                    given.append(1)
                    yield bytes(4000)

        return httpx.Response(200, stream=Endless())

    with pytest.raises(ExportIncomplete, match="another file by now"):
        fetched(endless, tmp_path / "model")
    assert len(given) == len(WEIGHTS) // 4000 + 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("headers", "told"),
    [
        ({"Content-Encoding": "gzip"}, "came as Content-Encoding: gzip"),
        ({"Content-Range": "bytes 2999-10239/10240"}, "from byte 3000 on, and came as 'bytes 2999-10239/10240'"),
        ({"Content-Range": "bytes 3000-10239/20000"}, "has 20000 bytes, and was announced with 10240"),
        ({"ETag": '"another"'}, 'came as "another" from byte 3000 on'),
    ],
)
def test_what_something_on_the_way_has_changed_is_told(tmp_path: Path, headers: dict[str, str], told: str) -> None:
    answer = Installation([WEIGHTS], [3000, None])

    def changed(request: httpx.Request) -> httpx.Response:
        given = answer(request)
        given.headers.update(headers if len(answer.ranges) > 1 else {})
        return given

    with pytest.raises(ExportIncomplete, match=re.escape(told)):
        fetched(changed, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_told_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = Installation([WEIGHTS], [None])
    answer.export["files"][0]["size_bytes"] = 5 << 30
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1 << 30))
    with pytest.raises(OSError, match="it takes 5,120 MiB, and 1,024 MiB are free"):
        fetched(answer, tmp_path / "model")
    assert answer.ranges == []


@pytest.mark.parametrize(
    "path",
    [
        "../model.safetensors",
        "/tmp/model.safetensors",
        "a//b",
        "",
        "a\\..\\b",
        "./a",
        "C:/x",
        "C:x",
        "a\0b",
        "a\nb",
        "a\x9fb",
        "a\ud800b",
    ],
)
def test_no_name_leads_out_of_the_directory(tmp_path: Path, path: str) -> None:
    answer = Installation([WEIGHTS], [None], listed=[path])
    with pytest.raises(ExportIncomplete, match="no name of a file"):
        fetched(answer, tmp_path / "in" / "model")
    assert answer.ranges == []
    assert list((tmp_path / "in").iterdir()) == []


def test_an_older_service_lists_no_files(tmp_path: Path) -> None:
    answer = Installation([WEIGHTS], [None])
    del answer.export["files"], answer.export["written_at"]
    with pytest.raises(ExportIncomplete, match=r"an older release.*copy jobs/job_1/exports/ep000001-step000020 out of"):
        fetched(answer, tmp_path / "model")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"status": "exporting", "files": []}, "is not ready: it is 'exporting'"),
        ({"files": [], "message": "its files cannot be listed"}, "gives no files: its files cannot be listed"),
    ],
)
def test_where_there_is_nothing_to_fetch_it_says_why(tmp_path: Path, said: dict[str, Any], told: str) -> None:
    answer = Installation([WEIGHTS], [None])
    answer.export |= said
    with pytest.raises(ExportIncomplete, match=told):
        fetched(answer, tmp_path / "model")
