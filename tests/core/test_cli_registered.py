"""What ``gspo env add`` reads before it asks the service."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_core.cli.command import CommandError
from gspo_core.cli.registered import _tasks


def test_tasks_are_the_lines_of_a_file_and_a_mistake_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"prompt": "one\u2028two\u2029three\x85four"}\n\n{"prompt": "five"}\n', encoding="utf-8")
    assert _tasks(str(file)) == [{"prompt": "one\u2028two\u2029three\x85four"}, {"prompt": "five"}]
    file.write_text('{"prompt": "\u2028"}\n\n7\n', encoding="utf-8")
    with pytest.raises(CommandError, match=r"tasks\.jsonl:3 must be a JSON object"):
        _tasks(str(file))
