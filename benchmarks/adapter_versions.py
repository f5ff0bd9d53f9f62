"""How many bytes is a version of a job with LoRA: whole, as a delta, as an adapter? And is what comes out the same?

Run: ``python -m benchmarks.adapter_versions [--steps 20]``, which writes the results anew. Two models: that of the demo
before its warm start, and the small Qwen3 of ``weight_deltas``. Each is trained by the learner on random answers with
random advantages (what is learned does not matter here, only that every addition moves). After every step the version
is published whole, as a delta to the one before, and as an adapter; a reader of adapters is compared with the whole
version bit for bit.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from benchmarks.weight_deltas import FILE, make_model
from examples.demo import demonstrations
from examples.demo.model import School
from gspo_core.batch import TrainSequence
from gspo_core.learner import Learner
from gspo_core.learner_config import LearnerConfig, LoraConfig, OptimizerConfig
from gspo_core.lora_adapter import ADAPTER_WEIGHTS, BaseWeights, merged_weights
from gspo_core.objective_config import ObjectiveConfig
from gspo_core.starter.untrained import write_untrained
from services.files.weight_deltas import DELTA_NAME, write_delta

RESULTS = Path(__file__).parent / "results" / "adapter_versions.md"
RANK, ALPHA, LR = 16, 32, 1e-4
NUM_ANSWERS, NUM_TOKENS = 8, 40


def demo_model(directory: Path, seed: int) -> Path:
    write_untrained(directory, School(directory, seed, demonstrations.COURSE).codec, seed)
    return directory


MODELS: dict[str, Callable[[Path, int], Path]] = {"the demo's": demo_model, "Qwen3, 4 layers of 256": make_model}


def learner_of(model: Path, dtype: str, *, publishes_adapter: bool) -> Learner:
    objective = ObjectiveConfig(minibatches=1, correction="none", k3_gate=None, outlier_gate=None, off_policy_gate=None)
    options: dict[str, Any] = {"dtype": dtype, "publishes_adapter": publishes_adapter}
    config = LearnerConfig(lora=LoraConfig(rank=RANK, alpha=ALPHA), optimizer=OptimizerConfig(lr=LR), **options)
    return Learner(model, config, objective, seed=0)


def drawn(rng: np.random.Generator, vocab_size: int) -> NDArray[np.int32]:
    return rng.integers(0, vocab_size, NUM_TOKENS, np.int32)


def answers(learner: Learner, vocab_size: int, rng: np.random.Generator) -> list[TrainSequence]:
    acts, zeros = np.arange(NUM_TOKENS) >= NUM_TOKENS // 4, np.zeros(NUM_TOKENS, np.int32)
    nothing = np.zeros(NUM_TOKENS, np.float32)
    plain = [
        TrainSequence(drawn(rng, vocab_size), acts, nothing, zeros, zeros, float(rng.normal()))
        for _ in range(NUM_ANSWERS)
    ]
    logprobs = learner.logprobs(plain)
    return [
        TrainSequence(one.token_ids, acts, np.where(acts, said, nothing), zeros, zeros, one.advantages)
        for one, said in zip(plain, logprobs, strict=True)
    ]


def timed(times: list[float], work: Callable[[], Any]) -> Any:
    began = time.perf_counter()
    result = work()
    times.append(1000 * (time.perf_counter() - began))
    return result


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def size_of(directory: Path, *names: str) -> int:
    return sum(path.stat().st_size for path in directory.iterdir() if not names or path.name in names)


def measure(root: Path, name: str, dtype: str, steps: int) -> str:
    model = MODELS[name](root / "model", 0)
    whole, alone = (learner_of(model, dtype, publishes_adapter=value) for value in (False, True))
    vocab_size = max(len(one) for key, one in load_file(model / FILE).items() if "embed_tokens" in key)
    rng, base = np.random.default_rng(0), BaseWeights(model)
    sizes: dict[str, list[int]] = {"whole": [], "delta": [], "adapter": [], "folder": []}
    times: dict[str, list[float]] = {"whole": [], "delta": [], "adapter": [], "read": []}
    whole.save_weights(before := root / "w0")
    num_same = num_whole = 0
    for step in range(1, steps + 1):
        batch = answers(whole, vocab_size, rng)
        for learner in (whole, alone):
            learner.step(batch)
        after, adapter = root / f"w{step}", root / f"a{step}"
        timed(times["whole"], partial(whole.save_weights, after))
        sizes["whole"].append(size_of(after, FILE))
        labels = f"j/1/{step - 1}", f"j/1/{step}"
        was_made = timed(times["delta"], partial(write_delta, before, labels[0], after, labels[1]))
        sizes["delta"].append(size_of(after, DELTA_NAME if was_made else FILE))
        num_whole += not was_made
        timed(times["adapter"], partial(alone.save_weights, adapter))
        sizes["adapter"].append(size_of(adapter, ADAPTER_WEIGHTS))
        sizes["folder"].append(size_of(adapter))
        merged = timed(times["read"], partial(merged_weights, base, adapter))
        expected = load_file(after / FILE)
        num_same += all(same_bits(merged[key], one) for key, one in expected.items())
        before = after
    return row(name, dtype, steps, sizes, times, num_same, num_whole)


def row(
    name: str,
    dtype: str,
    steps: int,
    sizes: dict[str, list[int]],
    times: dict[str, list[float]],
    num_same: int,
    num_whole: int,
) -> str:
    kib = {key: statistics.mean(values) / 1024 for key, values in sizes.items()}
    took = {key: statistics.median(values) for key, values in times.items()}
    cells = [
        name,
        dtype,
        f"{kib['whole']:,.0f}",
        f"{kib['delta']:,.0f} ({100 * kib['delta'] / kib['whole']:.0f} %), {num_whole} whole",
        f"{kib['adapter']:,.0f} ({100 * kib['adapter'] / kib['whole']:.1f} %)",
        f"{kib['folder']:,.0f}",
        f"{num_same} of {steps}",
        f"{took['whole']:.0f}, {took['delta']:.0f}, {took['adapter']:.0f}",
        f"{took['read']:.0f}",
    ]
    return f"| {' | '.join(cells)} |\n"


def heading(steps: int, load: float) -> str:
    columns = (
        *("model", "published in", "whole, KiB", "as a delta, KiB", "as an adapter, KiB", "its folder, KiB"),
        *("bits equal", "write whole, delta, adapter, ms", "merge and check, ms"),
    )
    return (
        "# What a version of a job with LoRA is\n\n"
        f"`python -m benchmarks.adapter_versions`: {steps} steps of the learner with additions of rank {RANK} (alpha "
        f"{ALPHA}) to all linear layers, learning rate {LR:g}, on random answers. Weights of random initialisation. "
        "Means of all versions; percentages are of the whole file; a delta that would be no smaller is not written, "
        "and the version counts as whole. The folder of an adapter holds its configuration, the digests and the "
        "tokenizer too. Milliseconds are medians, one thread on a shared machine; those of an adapter include merging "
        f"it once for its digest. Load average at the start {load:.0f}.\n\n"
        f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    text = heading(steps, os.getloadavg()[0])
    for name in MODELS:
        for dtype in ("float32", "bfloat16"):
            with TemporaryDirectory() as root:
                text += measure(Path(root), name, dtype, steps)
            print(text.splitlines()[-1], flush=True)
    RESULTS.write_text(text)


if __name__ == "__main__":
    main()
