"""Tokens a second and share of the peak rate of an update, beside TRL's where an interpreter has it.

    python -m benchmarks.gpu.rate FOLDER ours|trl DEVICE

prints the numbers of one side as JSON: each is a process of its own. Both train the same random model on the same
batch in bfloat16; memory for activations is spared by recomputing on both sides.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu.check import Differs, NotHere, Place
from benchmarks.model_shapes import QWEN3

MODEL = "Qwen3-0.6B"
LENGTH, GROUPS, MEMBERS = 2048, 4, 8
NUM_UPDATES = 3


def rate(place: Place) -> str:
    """The learner's rate; beside it TRL's."""
    if place.trl is None:
        raise NotHere("TRL is not installed (--trl PYTHON)")
    folder = place.folder / "rate"
    prepare(folder, QWEN3[MODEL], GROUPS, LENGTH)
    ours = _side(folder, "ours", place, Path(sys.executable))
    said = f"{MODEL}: {ours['tokens_per_s']:.0f} tokens/s, {_share_of_peak(ours['tokens_per_s'], place)}"
    trl = _side(folder, "trl", place, place.trl)
    return f"{said}; TRL {trl['tokens_per_s']:.0f} tokens/s; gradient norms {ours['norm']:.4g} and {trl['norm']:.4g}"


def prepare(folder: Path, shape: dict[str, Any], groups: int, length: int) -> None:
    """A model with random weights, and a batch of groups that share a quarter of the length."""
    from benchmarks.learner import make_batch, write_tokenizer
    from tests.core.learner_support import write_model

    plain = {key: value for key, value in shape.items() if key != "model_type"}
    plain |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    write_model(folder / "model", **plain, initializer_range=0.02, max_position_embeddings=4 * length)
    write_tokenizer(folder / "model", shape["vocab_size"])
    batch: dict[str, Any] = {"sequences": []}
    for _ in range(groups):
        batch["sequences"] += make_batch(shape["vocab_size"], length)["sequences"]
    batch["num_tokens"] = sum(len(prompt) + len(answer) for prompt, answer, _ in batch["sequences"])
    batch["length"] = length
    (folder / "batch.json").write_text(json.dumps(batch))


def _side(folder: Path, side: str, place: Place, python: Path) -> dict[str, float]:
    command = [str(python), "-m", __spec__.name, str(folder), side, place.device]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Differs(f"{side} ended with {done.returncode}: {done.stderr.strip()[-3000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(update: Callable[[], float], num_tokens: int, device: str) -> dict[str, float]:
    """The first update gives the norm of the gradient and warms everything up; the best of the others counts."""
    import torch

    norm, seconds = update(), []
    for _ in range(NUM_UPDATES):
        start = time.perf_counter()
        update()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return {"tokens_per_s": num_tokens / min(seconds), "norm": norm}


def ours(folder: Path, device: str) -> dict[str, float]:
    from benchmarks.learner import make_ours

    batch = json.loads((folder / "batch.json").read_text())
    learner, sequences = make_ours(folder / "model", batch, batch["length"], "shared", device=device, dtype="bfloat16")
    return measure(lambda: float(learner.step(sequences)["learner/grad_norm"]), batch["num_tokens"], device)


def trl(folder: Path, device: str) -> dict[str, float]:
    from benchmarks.learner import trl_update

    batch = json.loads((folder / "batch.json").read_text())
    return measure(trl_update(folder / "model", batch, device=device), batch["num_tokens"], device)


def _share_of_peak(tokens_per_s: float, place: Place) -> str:
    """MFU: the operations that the update cannot do without, over the maker's dense bfloat16 rate."""
    import torch

    from gspo_core.plan import shape_of
    from gspo_core.plan.machines import DEVICES

    shape = shape_of(QWEN3[MODEL])
    each = 3 * (2 * shape.num_active() + 4 * shape.num_layers * shape.queries * LENGTH / 4)
    name = torch.cuda.get_device_name() if place.device == "cuda" else "a CPU"
    known = [device for key, device in DEVICES.items() if key.split("-")[0] in name.lower().replace(" ", "")]
    if not known:
        return f"{tokens_per_s * each / 1e12:.1f} TFLOP/s (the peak rate of {name} is not known here)"
    return f"MFU {tokens_per_s * each / known[0].flops:.1%} of {name}"


if __name__ == "__main__":
    print(json.dumps({"ours": ours, "trl": trl}[sys.argv[2]](Path(sys.argv[1]), sys.argv[3])))
