"""The picture of docs/staleness.md: its points are those of the published numbers, and carry what the page says."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.gradient_atlas.estimators import PLAIN
from benchmarks.staleness_glance import ATLASES, RESULTS, clip_losses, directions, draw, settings


def test_every_setting_with_a_direction_is_a_point() -> None:
    found = settings()
    count = 0
    for name in ATLASES:
        for setting in json.loads((RESULTS / f"{name}.json").read_text())["results"]:
            count += any(line["estimator"] == PLAIN.name and line["cosine"] for line in setting["lines"])
    assert len(directions(found, PLAIN.name)) == count
    assert count > 30
    first_world = found[: len(json.loads((RESULTS / f"{ATLASES[0]}.json").read_text())["results"])]
    assert all(cosine >= 0.9 for k3, cosine in directions(first_world, PLAIN.name) if k3 < 0.02), (
        "as the page's table says"
    )


def test_a_clip_of_three_spreads_loses_nothing_and_one_of_a_fifth_much() -> None:
    points = clip_losses(settings())
    assert len(points) >= 50
    assert max(loss for spreads, loss in points if spreads >= 2.7) <= 0.03
    assert min(loss for spreads, loss in points if spreads <= 0.2) >= 0.29


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    draw(tmp_path / "glance.png")
    assert (tmp_path / "glance.png").stat().st_size > 50_000
