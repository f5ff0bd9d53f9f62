"""How fast and how big is one GSPO update, beside TRL's and beside plain logits?

    python -m benchmarks.learner [--quick]

The same randomly initialised Qwen3 (about 10 million parameters), the same ragged batch (groups of eight that share a
prompt, as rollouts do), one thread, float32, one AdamW update. Every cell of the table is a process of its own; memory
is what the process needed beyond having the model and the batch loaded. TRL runs from a virtual environment that this
script makes; it sees the packages of this one, so that torch and transformers are the same. All contestants must report
the same gradient norm, or the row says that they did not compute the same.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

import numpy as np

TRL = "trl==1.16.0"
RESULTS = Path(__file__).parent / "results" / "learner.json"
# (vocabulary, hidden size): about 10 million parameters each, most of them in the tied embedding
SHAPES = {32_000: 208, 151_936: 56}
LENGTHS = (128, 256, 512, 1024)
GROUPS, MEMBERS = 2, 8
ROWS = 4
"""Sequences that TRL and the plain form put through the model at once; ours gets as many tokens."""
NUM_UPDATES = 2
CONTESTANTS = ("ours, shared", "ours, packed", "ours, padded", "trl", "plain logits")
PLAIN_LIMIT_BYTES = 3 * 2**30


def make_batch(vocabulary: int, length: int) -> dict[str, Any]:
    """Prompts of a quarter of the length, answers of 10 to 75 % of it."""
    rng = np.random.default_rng(length)
    sequences = []
    for _ in range(GROUPS):
        prompt = rng.integers(2, vocabulary, length // 4)
        for _ in range(MEMBERS):
            answer = rng.integers(2, vocabulary, int(rng.integers(length // 10, 3 * length // 4)))
            sequences.append((prompt.tolist(), answer.tolist(), float(rng.normal())))
    return {"sequences": sequences}


def make_model(directory: Path, vocabulary: int, hidden: int) -> int:
    """Write a model and a tokenizer that only has to exist; returns the number of parameters."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(directory)
    words = {f"<{number}>": number for number in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<0>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<0>", eos_token="<1>").save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


class Memory:
    """Peak of this process's resident memory since `reset`, in bytes (Linux)."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self._before = self._status("VmRSS")

    def peak(self) -> int:
        return self._status("VmHWM") - self._before

    @staticmethod
    def _status(key: str) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
        raise RuntimeError(f"{key} is not in /proc/self/status: this benchmark needs Linux")


def measure(update: Any, num_tokens: int) -> dict[str, float]:
    """The first update counts for the gradient norm and for memory; the best of the others for time."""
    memory = Memory()
    norm = update()
    seconds = []
    for _ in range(NUM_UPDATES):
        start = time.process_time()
        update()
        seconds.append(time.process_time() - start)
    return {
        "tokens_per_s": num_tokens / min(seconds),
        "peak_mib": memory.peak() / 2**20,
        "grad_norm": norm,
        "spread": max(seconds) / min(seconds),
    }


def run_ours(model_dir: Path, batch: dict[str, Any], length: int, layout: str) -> dict[str, float]:
    from gspo_core.batch import TrainSequence
    from gspo_core.learner import Learner
    from gspo_core.learner_config import LearnerConfig, OptimizerConfig
    from gspo_core.objective_config import ObjectiveConfig

    sequences = []
    for prompt, answer, advantage in batch["sequences"]:
        acts = np.arange(len(prompt) + len(answer)) >= len(prompt)
        zeros: Any = np.zeros(len(acts))
        sequences.append(TrainSequence(np.array(prompt + answer), acts, zeros, zeros, zeros, advantage))
    objective = ObjectiveConfig(minibatches=1, correction="none", k3_gate=None, outlier_gate=None, off_policy_gate=None)
    config = LearnerConfig(
        optimizer=OptimizerConfig(lr=1e-6),
        micro_batch_tokens=ROWS * length,
        layout=layout,  # type: ignore[arg-type]
    )
    learner = Learner(model_dir, config, objective, seed=0)
    return measure(lambda: learner.step(sequences)["learner/grad_norm"], batch["num_tokens"])


def padded(batch: dict[str, Any]) -> list[dict[str, Any]]:
    """Micro-batches as TRL makes them: prompts padded on the left, answers on the right."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    def pad(rows: list[list[int]], side: str) -> tuple[Any, Any]:
        tensors = [torch.tensor(row) for row in rows]
        masks = [torch.ones_like(tensor) for tensor in tensors]
        return tuple(pad_sequence(given, batch_first=True, padding_side=side) for given in (tensors, masks))

    micro_batches = []
    for start in range(0, len(batch["sequences"]), ROWS):
        prompts, answers, advantages = zip(*batch["sequences"][start : start + ROWS], strict=True)
        prompt_ids, prompt_mask = pad(prompts, "left")
        completion_ids, completion_mask = pad(answers, "right")
        micro_batches.append(
            {
                "prompt_ids": prompt_ids,
                "prompt_mask": prompt_mask,
                "completion_ids": completion_ids,
                "completion_mask": completion_mask,
                "advantages": torch.tensor(advantages),
            }
        )
    return micro_batches


def run_trl(model_dir: Path, batch: dict[str, Any]) -> dict[str, float]:
    """TRL's own loss and backward pass on given completions; generation is left out."""
    import torch
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    micro_batches = padded(batch)
    args = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        importance_sampling_level="sequence",
        loss_type="grpo",
        epsilon=3e-4,
        epsilon_high=4e-4,
        beta=0.0,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=len(micro_batches),
        num_generations=MEMBERS,
        learning_rate=1e-6,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
    )
    dataset = Dataset.from_dict({"prompt": ["<2>"] * MEMBERS * GROUPS})
    trainer = GRPOTrainer(str(model_dir), reward_funcs=lambda **_: [], args=args, train_dataset=dataset)
    trainer.create_optimizer_and_scheduler(100)
    trainer.current_gradient_accumulation_steps = len(micro_batches)
    trainer.model.train()

    def update() -> float:
        for micro_batch in micro_batches:
            loss = trainer.compute_loss(trainer.model, dict(micro_batch))
            trainer.accelerator.backward(loss * len(micro_batches))  # which divides it by them again
        norm = torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        trainer.optimizer.step()
        trainer.model.zero_grad()
        return float(norm)

    trainer.accelerator.gradient_accumulation_steps = len(micro_batches)
    return measure(update, batch["num_tokens"])


def run_plain(model_dir: Path, batch: dict[str, Any]) -> dict[str, float]:
    """The model as it comes, with its logits for every token, and the loss written down."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)
    micro_batches, total = padded(batch), len(batch["sequences"])

    def update() -> float:
        for given in micro_batches:
            ids = torch.cat([given["prompt_ids"], given["completion_ids"]], 1)
            seen = torch.cat([given["prompt_mask"], given["completion_mask"]], 1)
            logits = model(input_ids=ids, attention_mask=seen).logits[:, :-1]
            scored = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]
            mask = given["completion_mask"]
            logprobs = scored[:, -mask.shape[1] :]
            mean_log_ratio = ((logprobs - logprobs.detach()) * mask).sum(-1) / mask.sum(-1)
            (-(mean_log_ratio.exp() * given["advantages"]).sum() / total).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(norm)

    return measure(update, batch["num_tokens"])


def run_child(contestant: str, model_dir: Path, batch_file: Path, length: int) -> None:
    import torch

    torch.set_num_threads(1)
    batch = json.loads(batch_file.read_text())
    batch["num_tokens"] = sum(len(prompt) + len(answer) for prompt, answer, _ in batch["sequences"])
    if contestant == "trl":
        result = run_trl(model_dir, batch)
    elif contestant == "plain logits":
        result = run_plain(model_dir, batch)
    else:
        result = run_ours(model_dir, batch, length, contestant.removeprefix("ours, "))
    print("RESULT " + json.dumps(result))


def make_trl_environment(directory: Path) -> Path:
    """A virtual environment with TRL that falls back on this one's packages; returns its interpreter."""
    python = directory / "bin" / "python"
    if not python.exists():
        venv.create(directory, with_pip=True)
    packages = directory / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (packages / "host.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", TRL], check=True)
    return python


def run_cell(python: Path, contestant: str, model_dir: Path, batch_file: Path, length: int) -> dict[str, float] | None:
    """One process; None where it does not fit or fails."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "HF_HUB_OFFLINE": "1",
    }
    command = [str(python), __file__, "--child", contestant, str(model_dir), str(batch_file), str(length)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        print(f"{contestant} failed:\n{done.stderr[-2000:]}", file=sys.stderr)
        return None
    result: dict[str, float] = json.loads(lines[-1].removeprefix("RESULT "))
    return result


def fits(contestant: str, vocabulary: int, length: int) -> bool:
    return contestant != "plain logits" or 2 * 4 * ROWS * length * vocabulary <= PLAIN_LIMIT_BYTES


def run_all(quick: bool, work: Path) -> list[dict[str, Any]]:
    trl_python = make_trl_environment(work / "trl")
    rows = []
    for vocabulary, hidden in SHAPES.items():
        model_dir = work / f"model-{vocabulary}"
        parameters = make_model(model_dir, vocabulary, hidden)
        for length in LENGTHS[:2] if quick else LENGTHS:
            batch_file = work / f"batch-{vocabulary}-{length}.json"
            batch_file.write_text(json.dumps(make_batch(vocabulary, length)))
            cells = {}
            for contestant in CONTESTANTS:
                python = trl_python if contestant == "trl" else Path(sys.executable)
                if fits(contestant, vocabulary, length):
                    cells[contestant] = run_cell(python, contestant, model_dir, batch_file, length)
            rows.append({"vocabulary": vocabulary, "length": length, "parameters": parameters, "cells": cells})
            print_row(rows[-1])
    return rows


def print_row(row: dict[str, Any]) -> None:
    trl = row["cells"].get("trl")
    norms = [cell["grad_norm"] for cell in row["cells"].values() if cell]
    agree = "" if np.allclose(norms, norms[0], rtol=1e-3) else f"  GRADIENTS DIFFER: {norms}"
    print(f"vocabulary {row['vocabulary']}, length {row['length']}, {row['parameters'] / 1e6:.1f}M parameters{agree}")
    for name, cell in row["cells"].items():
        if cell is None:
            print(f"  {name:14} failed")
            continue
        line = f"  {name:14} {cell['tokens_per_s']:8.0f} tokens/s {cell['peak_mib']:8.0f} MiB"
        if trl:
            speed, memory = cell["tokens_per_s"] / trl["tokens_per_s"], cell["peak_mib"] / trl["peak_mib"]
            line += f"   {speed:5.2f} x speed, {memory:5.2f} x memory of TRL"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two lengths only, and results are not kept")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        contestant, model_dir, batch_file, length = arguments.child
        run_child(contestant, Path(model_dir), Path(batch_file), int(length))
        return
    with tempfile.TemporaryDirectory() as work:
        rows = run_all(arguments.quick, Path(work))
    if arguments.quick:
        return
    import torch
    import transformers

    conditions = {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "trl": TRL},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, one thread used",
        "load_average": os.getloadavg(),
        "micro_batch": f"{ROWS} rows or {ROWS} x length tokens",
        "time": "CPU time of the process, best of two updates; memory beyond model and batch",
    }
    RESULTS.write_text(json.dumps({"conditions": conditions, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
