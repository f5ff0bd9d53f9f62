"""One job of two steps with a model of the exact shape of Qwen3-0.6B and random weights.

What it knows is nothing; what it costs is what the real one costs: the same tensors, vocabulary and files.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import Qwen3ForCausalLM

from services.files.data_dir import DataDir
from services.hosts.venv import Interpreters
from tests.ladder import report
from tests.ladder import worlds as all_worlds
from tests.ladder.axes import Row
from tests.ladder.job import Asked, Result, play, spec_of
from tests.ladder.measure import peaks
from tests.ladder.run import Ladder, Place, asked, line
from tests.ladder.speaker import qwen3_config, save_model, write_qwen_files
from tests.ladder.stack import running
from tests.ladder.worlds import World

NAME = "Qwen3-0.6B"
ARCHITECTURE = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "max_window_layers": 28,
    "rope_theta": 1_000_000,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
MIB = 2**20


def write_model(directory: Path) -> int:
    """Stored in bfloat16, as the published one is. Returns the number of parameters."""
    write_qwen_files(directory)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(qwen3_config(ARCHITECTURE)).to(torch.bfloat16)
    model.config.dtype = "bfloat16"
    save_model(model, directory)
    return sum(parameter.numel() for parameter in model.parameters())


def measure(place: Place, commit: str, train: str, say: Callable[[str], None]) -> int:
    """``train``: all weights, whose optimizer and checkpoint want several times the memory, or low-rank additions."""
    row = Row(260, 0, 1, 1, "calculator", 1, "auto", train)
    directory = place.path / "models" / NAME
    num_parameters = write_model(directory)
    say(f"{NAME}: {num_parameters:,} random parameters in {directory}")
    threads = len(os.sched_getaffinity(0))
    job = _asked(place, directory, row)
    with running(place.data, directory, 1, threads) as stack:
        loading = peaks(stack.pids)["engine-0"]
        (result,) = play(stack, place.data, [job])
    say(line(result))
    about = f"{num_parameters:,} parameters, {threads} threads for trainer and engine each."
    report.write_shape(
        Path(__file__).parents[2],
        train,
        {"shape": NAME, "commit": commit, "about": about, "measured": _measured(result, loading)},
    )
    return 1 if result.problems else 0


def _asked(place: Place, directory: Path, row: Row) -> Asked:
    world = World("calculator", "environments.calculator:Calculator", None)
    interpreters = Interpreters(DataDir(place.data).venvs)
    nature = asyncio.run(all_worlds.nature(world, place.codec(), interpreters))
    ladder = Ladder(0, {world.name: world}, {world.name: nature}, [row], [], {})
    given = asked(place, ladder, 0, row).spec
    environment = given["environments"][0]
    return Asked(row, {**spec_of(row, directory, environment["ref"], environment["config"], 0), "optimizer": {}})


def _measured(result: Result, loading: int) -> dict[str, str]:
    """What -> number with its unit."""
    memory = {f"memory of {kind}, peak": size for kind, size in sorted(result.memory_bytes.items())}
    disk = {f"disk: {part}": size for part, size in sorted(result.disk_bytes.items())}
    sizes = {"memory of engine while it loads, peak": loading, **memory, "Redis": result.redis_bytes, **disk}
    return {
        "verdict": "; ".join(result.problems) or "succeeded",
        "job, from submission to its end": f"{result.seconds:.0f} s",
        **{f"{name}, both steps": f"{seconds:.1f} s" for name, seconds in result.phases_s.items()},
        "tokens sampled and trained": f"{result.sampled:,}",
        "tokens of a prompt": f"{result.prompt_seen[0]:,} to {result.prompt_seen[1]:,}",
        **{what: f"{size / MIB:,.1f} MiB" for what, size in sizes.items()},
        "log-probs": result.provenance,
    }
