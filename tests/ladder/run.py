"""A run of the ladder: worlds looked at, rows drawn, each played, results kept after each so that a run can go on.

Rule: what is kept says its commit, seed and row; nothing of another tree is taken for this one's unless that is asked
for, and then the page says so.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gspo_core.chat import ChatCodec, load_codec
from gspo_core.env import InvalidEnvironment
from services.files.data_dir import DataDir
from services.hosts.venv import Interpreters
from tests.ladder import worlds as all_worlds
from tests.ladder.axes import JOBS, Nature, Row, all_maxima, cost, rows_of
from tests.ladder.covering import Pair
from tests.ladder.job import Asked, Result, play, spec_of
from tests.ladder.speaker import write_qwen_files, write_speaker
from tests.ladder.stack import openenv_server, running
from tests.ladder.worlds import World

Say = Callable[[str], None]


@dataclass(frozen=True)
class Place:
    """The directory of runs."""

    path: Path

    @property
    def data(self) -> Path:
        return self.path / "data"

    @property
    def worlds(self) -> Path:
        return self.path / "worlds"

    @property
    def kept(self) -> Path:
        return self.path / "results.jsonl"

    def model(self, says: str | None) -> Path:
        """Made when it is missing."""
        named = "".join(letter if letter.isalnum() else "-" for letter in says or "words")
        directory = self.path / "models" / named
        if not (directory / "generation_config.json").is_file():
            write_speaker(directory, says)
        return directory

    def codec(self) -> ChatCodec:
        directory = self.path / "models" / "qwen-files"
        write_qwen_files(directory)
        return load_codec(directory)


@dataclass(frozen=True)
class Ladder:
    """What a run plays."""

    seed: int
    worlds: dict[str, World]
    natures: dict[str, Nature]
    rows: list[Row]
    impossible: list[Pair]
    without: dict[str, str]
    """Worlds that cannot be had here, and why."""


def plan(place: Place, seed: int, openenv_url: str, say: Say) -> Ladder:
    """Looks at every world; the first time, packages of the adapters are installed."""
    interpreters = Interpreters(DataDir(place.data).venvs, may_install=True)
    found = [all_worlds.plain(), *all_worlds.shipped(openenv_url), *all_worlds.of_pages(place.worlds)]
    without = {}
    try:
        found += all_worlds.adapters(interpreters)
        natures = asyncio.run(all_worlds.natures(found, place.codec(), interpreters, say))
    except InvalidEnvironment as error:
        without = {"the adapters with packages of their own": str(error)}
        found = [one for one in found if one.name not in ("gym", "reasoning_gym", "mcp")]
        natures = asyncio.run(all_worlds.natures(found, place.codec(), interpreters, say))
    rows, covering = rows_of(natures, seed)
    return Ladder(seed, {one.name: one for one in found}, natures, rows, covering.impossible, without)


@dataclass(frozen=True)
class Climb:
    """One run."""

    commit: str
    seed: int
    only: str = ""
    """Rows whose name has this in it."""
    any_commit: bool = False
    """What another tree has played counts."""
    keep: bool = False
    """The directories of jobs that were well stay, for who trains their steps again."""


def climb(place: Place, run: Climb, say: Say) -> Iterator[tuple[Ladder, list[Result]]]:
    """Play every row that is wanted and not kept as played; yields all results of the plan so far, again and again."""
    with openenv_server(place.data / "logs") as url:
        ladder = plan(place, run.seed, url, say)
        wanted = [row for row in ladder.rows if run.only in row.name]
        kept = _kept(place, run)
        todo = [batch for batch in batches(wanted, ladder.natures) if any(row.name not in kept for row in batch)]
        left = {row for batch in todo for row in batch}
        say(f"{len(wanted)} rows, {len(wanted) - len(left)} of them played before")
        yield ladder, _in_order(wanted, kept)
        if todo:
            with running(place.data, place.model(None), max(JOBS)) as stack:
                for number, batch in enumerate(todo, 1):
                    wanted_of = [asked(place, ladder, *one) for one in enumerate(batch)]
                    results = play(stack, place.data, wanted_of, keep=run.keep)
                    for result in results:
                        say(f"{number}/{len(todo)} {line(result)}")
                    for result in _worst_of_each(results):
                        result.commit = run.commit
                        kept[result.name] = result
                        _keep(place, run.seed, result)
                    yield ladder, _in_order(wanted, kept)


def _in_order(rows: Sequence[Row], kept: Mapping[str, Result]) -> list[Result]:
    return [kept[row.name] for row in rows if row.name in kept]


def batches(rows: Sequence[Row], worlds: dict[str, Nature]) -> Iterator[list[Row]]:
    """What runs at once: rows for two jobs go in pairs that take about as long; the largest, at last, beside itself."""
    largest = all_maxima(worlds)
    two = sorted((row for row in rows if row.jobs > 1 and row != largest), key=lambda row: (not row.exact, cost(row)))
    for at in range(0, len(two), 2):
        yield (two[at : at + 2] * 2)[:2]
    yield from ([row] for row in sorted(rows, key=cost) if row.jobs == 1)
    yield from ([row, row] for row in rows if row == largest)


def _worst_of_each(results: Sequence[Result]) -> list[Result]:
    """One for each row, where a row runs beside itself."""
    ordered = sorted(results, key=lambda result: (bool(result.problems), result.seconds))
    return list({result.name: result for result in ordered}.values())


def asked(place: Place, ladder: Ladder, number: int, row: Row) -> Asked:
    """``number``: of the job among those that run at once."""
    world = ladder.worlds[row.world]
    own = ladder.natures[row.world].prompt[row.tools]
    sizes = {
        "prompt_words": max(0, row.prompt - own),
        "observation_words": row.observation,
        "num_turns": row.turns,
        "num_tools": row.tools,
    }
    config = {"inner": world.ref, "config": dict(world.config), **sizes}
    ref = all_worlds.larger(world, place.worlds)
    return Asked(row, spec_of(row, place.model(world.says(row.tools)), ref, config, ladder.seed + number))


def line(result: Result) -> str:
    least, most = result.prompt_seen
    seen = f"prompt {least}" if least == most else f"prompt {least} to {most}"
    memory = result.memory_bytes.get("attempt", 0) / 2**20
    numbers = f"{seen}, episode {result.episode_tokens}, {result.sampled} sampled, {memory:.0f} MiB in the trainer"
    verdict = "; ".join(result.problems) or numbers
    return f"{'FAILED' if result.problems else 'ok'} {result.name}: {result.seconds:.1f} s, {verdict}"


def _kept(place: Place, run: Climb) -> dict[str, Result]:
    """Those that were well; what failed is played again."""
    found = {}
    for text in place.kept.read_text().splitlines() if place.kept.is_file() else ():
        record = json.loads(text)
        result = Result(**record["result"])
        is_ours = run.any_commit or result.commit == run.commit
        if is_ours and record["seed"] == run.seed and not result.problems:
            result.prompt_seen = (result.prompt_seen[0], result.prompt_seen[1])
            found[result.name] = result
    return found


def _keep(place: Place, seed: int, result: Result) -> None:
    with place.kept.open("a") as file:
        file.write(json.dumps({"seed": seed, "result": asdict(result)}) + "\n")
