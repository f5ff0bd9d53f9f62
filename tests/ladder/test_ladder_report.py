"""What one run writes to the page leaves what others have written."""

from __future__ import annotations

from pathlib import Path

from tests.ladder.axes import TRAINED
from tests.ladder.commit import WRITTEN
from tests.ladder.report import write_shape


def test_a_shape_that_is_measured_again_replaces_its_own_part_alone(tmp_path: Path) -> None:
    page = tmp_path / WRITTEN[1]
    page.parent.mkdir(parents=True)
    for number, train in enumerate([*TRAINED, "lora"]):
        measured = {"verdict": f"verdict {number}"}
        write_shape(tmp_path, train, {"shape": "Tiny", "commit": "c", "about": "About.", "measured": measured})
    text = page.read_text()
    assert [f"verdict {number}" in text for number in range(3)] == [True, False, True]
    assert "--shape tiny --train full`" in text
