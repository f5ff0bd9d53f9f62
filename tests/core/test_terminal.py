"""What others wrote does nothing to the terminal that shows it."""

from __future__ import annotations

import pytest

from gspo_core.cli.terminal import plain, say


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("two words\n\tand a tab \u00fc \u65e5 \U0001f642", "two words\n\tand a tab \u00fc \u65e5 \U0001f642"),
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("\x9b2J", "\\x9b2J"),
        ("over\rwritten\x08", "over\\rwritten\\x08"),
        ("\u202egnp.exe\u2066", "\\u202egnp.exe\\u2066"),
        ("half a \ud83d pair", "half a \\ud83d pair"),
    ],
)
def test_what_a_terminal_acts_on_is_spelled_out(text: str, shown: str):
    assert plain(text) == shown


def test_each_line_is_printed_so(capsys: pytest.CaptureFixture[str]):
    say("a\x07", "b")
    assert capsys.readouterr().out == "a\\x07\nb\n"
