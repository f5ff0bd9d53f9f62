"""Numbers that JSON does not have are refused in a line before anything is asked."""

from __future__ import annotations

import pytest

from gspo_core.cli import main
from gspo_core.strict_json import TextRejected, typed_value

NOWHERE = ("--url", "http://127.0.0.1:9")
PLAYED = ("eval", "http://127.0.0.1:9#m", "--env", "json:JSONDecoder")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            ("set", "job_01m2x4j8w0e9qk3v5t7y1r6n2b", "optimizer.lr=NaN", *NOWHERE),
            "optimizer.lr=NaN: NaN is not a JSON",
        ),
        (("set", "job_01m2x4j8w0e9qk3v5t7y1r6n2b", "optimizer.lr=1e999", *NOWHERE), "the number 1e999 is too large"),
        (
            ("fork", "job_01m2x4j8w0e9qk3v5t7y1r6n2b@3", "--set", "optimizer.lr=-Infinity", *NOWHERE),
            "-Infinity is not a",
        ),
        (("env", "add", "shop", "a:B", "--config", '{"x": NaN}', *NOWHERE), "--config is not JSON: NaN is not a JSON"),
        ((*PLAYED, "--config", '{"x": Infinity}'), "the config is not JSON: Infinity is not a JSON number"),
        ((*PLAYED, "--agent", '{"turns": NaN}'), "--agent is not JSON: NaN is not a JSON number"),
        ((*PLAYED, "--temperature", "nan"), "--temperature nan is no temperature"),
    ],
)
def test_what_is_no_number_of_json_is_refused_in_a_line(
    line: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line) == 1
    said = capsys.readouterr().err
    assert told in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "value"),
    [("5e-7", 5e-7), ("true", True), ('"NaN"', "NaN"), ("dapo", "dapo"), ("Infinity War", "Infinity War")],
)
def test_what_is_typed_is_json_or_text(text: str, value: object) -> None:
    assert typed_value(text) == value


def test_json_that_two_readers_would_read_differently_is_not_taken_as_text() -> None:
    for text in ("NaN", '{"a": 1, "a": 2}', "[" * 100 + "]" * 100):
        with pytest.raises(TextRejected):
            typed_value(text)
