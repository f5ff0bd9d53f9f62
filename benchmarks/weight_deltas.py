"""How much of the weights changes in a step, and what does a delta move? Real steps of the learner, in bfloat16.

Run: ``python -m benchmarks.weight_deltas --lr 1e-6 [--steps 100]``, which adds its rows to the results. A small Qwen3,
initialised as transformers does, samples answers of its own every ten steps and is trained on them (groups of four, the
share of even tokens as the reward). After every step the version is published as a delta to the one before; a copy that
only ever follows deltas is compared with the whole version bit for bit, and by digest.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from gspo_core.batch import TrainSequence
from gspo_core.learner import Learner
from gspo_core.learner_config import LearnerConfig, OptimizerConfig
from gspo_core.objective_config import ObjectiveConfig
from services.engine.deltas import follow
from services.files import weight_deltas
from services.files.weight_deltas import DELTA_NAME, digest_in, tensors_in, write_delta

RESULTS = Path(__file__).parent / "results" / "weight_deltas.md"
SHAPE = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
GROUPS, MEMBERS, PROMPT, ANSWER, FRESH_EVERY = 2, 4, 8, 32, 10
FILE = "model.safetensors"


def make_model(directory: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    config = Qwen3Config(
        **SHAPE,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


@torch.inference_mode()
def sample(directory: Path, seed: int) -> list[list[int]]:
    """Answers of the model to random prompts, several to each, enough for the steps until the next time."""
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32)
    num = GROUPS * FRESH_EVERY
    prompts = torch.randint(0, SHAPE["vocab_size"], (num, PROMPT)).repeat_interleave(MEMBERS, 0)
    options = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0, "pad_token_id": 0}
    found: list[list[int]] = model.generate(prompts, max_new_tokens=ANSWER, **options).tolist()
    return found


def sequences_of(learner: Learner, rows: list[list[int]]) -> list[TrainSequence]:
    """With the log-probs that the learner has at this moment, and advantages within each group."""
    rewards = np.array([np.mean([token % 2 == 0 for token in row[PROMPT:]]) for row in rows]).reshape(-1, MEMBERS)
    advantages = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + 1e-6)
    acts = np.arange(PROMPT + ANSWER) >= PROMPT
    zeros: Any = np.zeros(len(acts))
    plain = [TrainSequence(np.array(row), acts, zeros, zeros, zeros, 0.0) for row in rows]
    made = []
    for one, logprobs, advantage in zip(plain, learner.logprobs(plain), advantages.flatten(), strict=True):
        behavior = np.where(acts, np.nan_to_num(logprobs), 0.0).astype(np.float32)
        made.append(TrainSequence(one.token_ids, acts, behavior, zeros, zeros, float(advantage)))
    return made


def export(learner: Learner, directory: Path) -> None:
    """As a trainer on a GPU publishes: master weights in float32, rounded to bfloat16."""
    directory.mkdir()
    learner.save_weights(directory)
    tensors = {name: one.to(torch.bfloat16) for name, one in load_file(directory / FILE).items()}
    save_file(tensors, directory / FILE)


@dataclass
class Run:
    lr: float
    seed: int
    shares: list[float] = field(default_factory=list)
    changed: list[float] = field(default_factory=list)
    write_s: list[float] = field(default_factory=list)
    follow_s: list[float] = field(default_factory=list)
    num_equal: int = 0
    num_whole: int = 0

    def step(self, before: Path, after: Path, version: int, held: dict[str, Tensor]) -> None:
        """Publishes ``after`` as a delta, and lets the copy follow."""
        old, new = tensors_in(before), tensors_in(after)
        num = sum(one.bits.size for one in new.values())
        self.changed.append(sum(int((old[name].bits != one.bits).sum()) for name, one in new.items()) / num)
        labels = f"job/1/{version - 1}", f"job/1/{version}"
        self.write_s.append(timed(lambda: write_delta(before, labels[0], after, labels[1])))
        if not (after / DELTA_NAME).exists():
            self.num_whole += 1
            self.shares.append(1.0)
            held |= load_file(after / FILE)
        else:
            self.shares.append((after / DELTA_NAME).stat().st_size / (after / FILE).stat().st_size)
            self.follow_s.append(timed(lambda: held.update(follow(held, labels[0], [after]).tensors)))
        whole = load_file(after / FILE)
        is_equal = all(torch.equal(held[name].view(torch.int16), one.view(torch.int16)) for name, one in whole.items())
        described = {name: ("BF16", list(one.shape), _sha256(one)) for name, one in held.items()}
        self.num_equal += is_equal and weight_deltas.digest_of(described) == digest_in(after)

    def row(self, steps: int) -> str:
        cells = [
            f"{self.lr:g}",
            str(self.seed),
            f"{100 * statistics.mean(self.changed):.2f} % ({100 * max(self.changed):.2f} %)",
            f"{100 * statistics.mean(self.shares):.2f} %",
            f"{100 * statistics.mean(self.shares[-90:]):.2f} %",
            f"{100 * max(one for one in self.shares if one < 1):.2f} %",
            str(self.num_whole),
            f"{self.num_equal} of {steps}",
            f"{1000 * statistics.median(self.write_s):.0f}",
            f"{1000 * statistics.median(self.follow_s):.0f}",
        ]
        return "| " + " | ".join(cells) + " |"


def _sha256(tensor: Tensor) -> str:
    return weight_deltas.Tensor("BF16", tuple(tensor.shape), tensor.view(torch.int16).numpy().view(np.uint16)).sha256()


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(root: Path, lr: float, seed: int, steps: int) -> Run:
    run = Run(lr, seed)
    objective = ObjectiveConfig(minibatches=1, correction="none", k3_gate=None, outlier_gate=None, off_policy_gate=None)
    config = LearnerConfig(optimizer=OptimizerConfig(lr=lr), micro_batch_tokens=GROUPS * MEMBERS * (PROMPT + ANSWER))
    learner = Learner(make_model(root / "model", seed), config, objective, seed=seed)
    export(learner, before := root / "v0")
    held = load_file(before / FILE)
    batch: list[TrainSequence] = []
    for version in range(1, steps + 1):
        if not batch:
            batch = sequences_of(learner, sample(before, seed + version))
        learner.step(batch[: GROUPS * MEMBERS])
        batch = batch[GROUPS * MEMBERS :]
        export(learner, after := root / f"v{version}")
        run.step(before, after, version, held)
        shutil.rmtree(before)
        before = after
    learner.close()
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    load, rows = os.getloadavg()[0], []
    for lr in arguments.lr:
        for seed in arguments.seeds:
            with TemporaryDirectory() as root:
                rows.append(measure(Path(root), lr, seed, arguments.steps).row(arguments.steps))
            print(rows[-1], flush=True)
    if not RESULTS.exists():
        RESULTS.write_text(heading(arguments.steps))
    with RESULTS.open("a") as file:
        file.writelines(f"{row[:-1]}| {load:.0f} |\n" for row in rows)


def heading(steps: int) -> str:
    shape = ", ".join(f"{name} {value}" for name, value in SHAPE.items())
    columns = (
        *("learning rate", "seed", "elements changed, mean (most)", "bytes moved", "without the first ten steps"),
        *("largest delta", "whole versions", "bits and digest equal", "write, ms", "follow, ms", "load average"),
    )
    return (
        "# What changes in a step\n\n"
        f"`python -m benchmarks.weight_deltas`: {steps} chained steps of the learner (AdamW, master weights in "
        f"float32, {GROUPS} groups of {MEMBERS} answers of {ANSWER} tokens, the model's own), each exported in "
        f"bfloat16. Qwen3, randomly initialised: {shape}, tied. Shares are of the whole file, every version counted, "
        "whole ones as 100 %. Milliseconds are medians, one thread on a shared machine.\n\n"
        f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n"
    )


if __name__ == "__main__":
    main()
