"""What outlives a process has a number, and a change of it cannot be forgotten.

The rule: a shape or text that a release wrote never changes under its number. A change raises the number once after
each release; until the next one the digest in ``formats.json`` is replaced (``python -m tests.repo.formats``).
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import NotRequired, TypedDict

import msgspec
import pytest

from gspo_core.types import StopReason
from tests.repo.formats import BEFORE_THIS_TABLE, FUNCTIONS, KEPT, ROOT, Format, all_formats, complaints, kept, released
from tests.repo.shapes import shape_of


@pytest.fixture(scope="module")
def formats() -> list[Format]:
    return all_formats()


def test_a_shape_does_not_change_without_a_new_number(formats: list[Format]) -> None:
    known = kept(KEPT.read_text())
    changed = [one.complaint for one in formats if known.get(one.name) != (one.number, one.digest)]
    assert not changed, "\n".join([*changed, "then say python -m tests.repo.formats"])
    assert sorted(known) == sorted(one.name for one in formats)


def test_what_a_release_wrote_keeps_its_number(formats: list[Format]) -> None:
    assert not complaints(formats, released())


def test_the_fixture_of_each_release_is_looked_at() -> None:
    names = {path.name.removesuffix(".tar.xz") for path in (ROOT / "tests/releases").glob("*.tar.xz")}
    assert names == set(released())


def test_each_number_stands_where_the_complaint_says(formats: list[Format]) -> None:
    for one in formats:
        file, _, name = one.place.partition(" ")
        text = (ROOT / file).read_text()
        assert f"{name} = {one.number}\n" in text or f"{name}: Final = {one.number}\n" in text, one.place


def test_a_change_under_a_released_number_is_a_sentence() -> None:
    now = Format("walls", "house/walls.py SCHEMA", 3, {"fields": {"colour": "str"}})
    said = "the shape of walls changed: raise SCHEMA in house/walls.py and write what reads the old one"
    assert complaints([now], {"1.0": {"walls": (3, now.digest)}, "0.9": {"walls": (2, "another")}}) == []
    assert complaints([now], {"1.0": {"walls": (3, "another")}}) == [f"{said} (release 1.0 wrote number 3)"]
    assert complaints([now], {"1.0": {"walls": (4, now.digest)}}) == [f"{said} (release 1.0 wrote number 4)"]


def test_the_functions_of_the_first_release_are_not_those_of_today(formats: list[Format]) -> None:
    now = {one.name: one for one in formats}[FUNCTIONS]
    first, digest = BEFORE_THIS_TABLE["0.1.0"][FUNCTIONS]
    assert now.number > first
    assert now.digest != digest


class Wall(msgspec.Struct):
    height: int


class PackedWall(msgspec.Struct, array_like=True):
    height: int
    colour: str


class RepackedWall(msgspec.Struct, array_like=True):
    colour: str
    height: int


@dataclasses.dataclass
class Room:
    """Of a house."""

    walls: list[Wall]
    height: int | None = None


class Told(TypedDict):
    reason: StopReason
    height: NotRequired[int]


def test_a_shape_is_what_is_written() -> None:
    assert shape_of(Room) == {
        "fields": {"height": {"either": ["NoneType", "int"]}, "walls": {"list": [{"fields": {"height": "int"}}]}}
    }
    told = json.dumps(shape_of(Told))
    assert '"height?": "int"' in told
    assert "'completed'" in told
    assert shape_of(PackedWall) != shape_of(RepackedWall)
    assert shape_of(Path) == "Path"
