"""Exports that the client fetches: over connections that break, of files that change, and never out of their folder."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_core.client import ApiError, Client, Unreachable
from gspo_core.client_checkpoints import TRIES, ExportIncomplete

ID = "job_1/1/20"
WEIGHTS = bytes(range(256)) * 40


class Breaking(httpx.SyncByteStream):
    """Gives ``content`` in pieces, and breaks after so many bytes."""

    def __init__(self, content: bytes, at: int | None) -> None:
        self._content, self._at = content, at

    def __iter__(self) -> Iterator[bytes]:
        content = self._content if self._at is None else self._content[: self._at]
        for start in range(0, len(content), 1000):
            yield content[start : start + 1000]
        if self._at is not None:
            raise httpx.ReadError("the connection broke")


def installation(
    contents: Sequence[bytes], breaks: Sequence[int | None], listed: Sequence[str] = ("model.safetensors",)
) -> tuple[Callable[[httpx.Request], httpx.Response], list[str | None]]:
    """Answers the n-th download from the n-th of ``contents`` and breaks it there (the last of both goes on); what was
    asked for as a range."""
    ranges: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if not request.url.path.endswith("/model.safetensors"):
            files = [{"path": path, "size_bytes": len(contents[-1])} for path in listed]
            return httpx.Response(200, json={"id": ID, "files": [], "export": {"status": "ready", "files": files}})
        number = len(ranges)
        content = contents[min(number, len(contents) - 1)]
        tag, asked = f'"{hash(content)}"', request.headers.get("range")
        ranges.append(asked)
        start = int(re.sub(r"\D", "", asked)) if asked and request.headers["if-range"] == tag else 0
        stream = Breaking(content[start:], breaks[min(number, len(breaks) - 1)])
        return httpx.Response(206 if start else 200, headers={"ETag": tag}, stream=stream)

    return answer, ranges


def fetched(answer: Callable[[httpx.Request], httpx.Response], to: Path, slept: list[float] | None = None) -> Path:
    slept = [] if slept is None else slept
    with Client("http://there", transport=httpx.MockTransport(answer), sleep=slept.append) as client:
        return client.fetch_export(ID, to)


@given(st.lists(st.integers(1, 4000), max_size=6))
def test_what_breaks_is_gone_on_with(tmp_path_factory: pytest.TempPathFactory, lengths: list[int]) -> None:
    to = tmp_path_factory.mktemp("fetched") / "model"
    answer, ranges = installation([WEIGHTS], [*lengths, None])
    assert (fetched(answer, to) / "model.safetensors").read_bytes() == WEIGHTS
    at, expected = 0, [None]
    for length in lengths:
        at += min(length, len(WEIGHTS) - at)
        if at == len(WEIGHTS):
            break
        expected.append(f"bytes={at}-")
    assert ranges == expected


def test_a_file_that_is_another_one_meanwhile_is_fetched_from_its_beginning(tmp_path: Path) -> None:
    answer, ranges = installation([WEIGHTS, WEIGHTS[::-1]], [3000, None])
    assert (fetched(answer, tmp_path / "model") / "model.safetensors").read_bytes() == WEIGHTS[::-1]
    assert ranges == [None, "bytes=3000-"]


def test_a_connection_that_gives_nothing_more_is_given_up_and_leaves_nothing(tmp_path: Path) -> None:
    slept: list[float] = []
    answer, ranges = installation([WEIGHTS], [3000, 0])
    with pytest.raises(Unreachable, match="broke"):
        fetched(answer, tmp_path / "model", slept)
    assert (len(ranges), len(slept)) == (TRIES + 1, TRIES)
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_is_not_repeated(tmp_path: Path) -> None:
    answer, ranges = installation([WEIGHTS], [None])

    def refuse(request: httpx.Request) -> httpx.Response:
        listed = answer(request)
        error = {"error": {"code": "export_file_not_found", "message": "it is gone"}}
        return httpx.Response(404, json=error) if ranges else listed

    with pytest.raises(ApiError, match="it is gone"):
        fetched(refuse, tmp_path / "model")
    assert len(ranges) == 1
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_stays_and_what_is_short_does_not_count(tmp_path: Path) -> None:
    answer, _ = installation([WEIGHTS], [None])
    (tmp_path / "model").mkdir()
    with pytest.raises(FileExistsError):
        fetched(answer, tmp_path / "model")
    short, _ = installation([WEIGHTS[:-1], WEIGHTS], [None])
    with pytest.raises(ExportIncomplete, match="10239 bytes, and should have 10240"):
        fetched(short, tmp_path / "other")
    assert [one.name for one in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("path", ["../model.safetensors", "/tmp/model.safetensors", "a//b", "", "a\\..\\b", "./a"])
def test_no_name_leads_out_of_the_directory(tmp_path: Path, path: str) -> None:
    answer, ranges = installation([WEIGHTS], [None], [path])
    with pytest.raises(ExportIncomplete, match="no name of a file"):
        fetched(answer, tmp_path / "in" / "model")
    assert ranges == []
    assert list((tmp_path / "in").iterdir()) == []


def test_an_older_service_lists_no_files(tmp_path: Path) -> None:
    def older(request: httpx.Request) -> httpx.Response:
        del request
        return httpx.Response(200, json={"id": ID, "files": [], "export": {"status": "ready"}})

    with pytest.raises(ExportIncomplete, match="an older service"):
        fetched(older, tmp_path / "model")
