"""The page of the worked case, and what docs/time-machine.md tells of it, are what was measured."""

from __future__ import annotations

from pathlib import Path

from benchmarks.worked_case_page import PAGE, page, percent, read

DOC = Path(__file__).parents[2] / "docs" / "time-machine.md"


def test_the_page_is_written_from_the_record() -> None:
    assert PAGE.read_text() == page(read())


def test_the_manual_tells_what_was_measured() -> None:
    found, text = read(), " ".join(DOC.read_text().split())
    first, second = (look["influences"] for look in found["looks"])
    assert first[0]["cosine"] is not None
    assert (
        f"without the pull of group {first[0]['group']} the step would have ended {first[0]['share']:.0%} of its way "
        f"elsewhere (update cosine {first[0]['cosine']:.2f}), without the next one's {first[1]['share']:.0%}"
    ).replace("%", " %") in text
    told = f"group {second[0]['group']} stands out, 0 0 0 0 1 0 1 0: {second[0]['share']:.0%} of the way, the next"
    assert f"{told} {second[1]['share']:.0%}".replace("%", " %") in text
    curves = {run["name"]: {step: percent(value) for step, value in run["curve"].items()} for run in found["runs"]}
    was = curves["as it was"]
    assert f"{was['21']} % after step 21, {was['24']} % after step 24 and {was['30']} % after step 30" in text
    later = curves[f"fork after step 21, without group {second[0]['group']}"]
    assert f"is at {later['27']} % after step 27 and {later['30']} % after step 30, where its parent is at" in text
