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


def test_clips_lose_what_the_page_says() -> None:
    points = clip_losses(settings())
    assert len(points) >= 150
    short = [point for point in points if point.length == 20]
    assert max(point.lost for point in short if point.spreads >= 2.7) <= 0.035
    assert min(point.lost for point in short if point.spreads <= 0.2) >= 0.15
    assert max(point.lost for point in points if point.clip_low >= 0.01) <= 0.035
    long = [point for point in points if point.length == 1000]
    assert max(point.lost for point in long if point.spreads > 5) > 0.8, "so a multiple of the spread is no rule there"


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    draw(tmp_path / "glance.png")
    assert (tmp_path / "glance.png").stat().st_size > 50_000
