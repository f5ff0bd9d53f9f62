"""How fast and how big is one GSPO update, beside TRL's and beside plain logits?

    python -m benchmarks.learner [--quick]

The same randomly initialised Qwen3 (about 10 million parameters), the same ragged batch (groups of eight that share a
prompt, as rollouts do), one thread, float32, one AdamW update. Every cell of the table is a process of its own; memory
is what the process needed beyond having the model and the batch loaded. TRL runs from a virtual environment that this
script makes; it sees the packages of this one, so that torch and transformers are the same. All contestants must report
the same gradient norm, or the report says that they did not compute the same.

A second table splits the time of our update and compares each part with its arithmetic: floating-point operations that
it cannot do without, over the rate of a large matrix product on the same core in the same process.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.trl_venv import TRL, make_trl_environment

RESULTS = Path(__file__).parent / "results" / "learner.md"
# (vocabulary, hidden size): about 10 million parameters each, most of them in the tied embedding
SHAPES = {32_000: 208, 151_936: 56}
LENGTHS = (128, 256, 512, 1024)
GROUPS, MEMBERS = 1, 8
ROWS = 4
"""Sequences that TRL and the plain form put through the model at once; ours gets as many tokens."""
NUM_UPDATES = 2
CONTESTANTS = ("ours, shared", "ours, packed", "ours, padded", "trl", "plain logits")
PLAIN_LIMIT_BYTES = 3 * 2**30
LAYERS, HEADS, KEY_HEADS, HEAD_DIM = 4, 4, 2, 32


NOTES = """\
How to read it. All score the answers only, but for plain logits, which score every position. TRL's head is chunked
like ours, in tiles of up to 4096 tokens by part of the vocabulary. On a GPU a kernel of its own folds a tile in
place; on a CPU it falls back to torch operations that keep several copies of a tile, and computes an entropy that
this loss does not use. With 32k tokens and a length of 256, nine tenths of TRL's time were spent in this head
(measured apart). So the ratios to TRL say how the two compare on a CPU, and nothing about a GPU, where neither has
been measured; plain logits are the fairer yardstick of speed here. They are left out where the logits of a
micro-batch and their log-softmax would take more than 3 GiB. `shared` computes the prompt of a group once; with a
quarter of the tokens in prompts and most of the work in the head it gains little here, and more with long prompts or
larger models."""
PARTS_NOTES = """\
The last two columns say how much of a part's time its floating-point operations would take: at the rate of a large
square product, and at the rate that the head's forward product reaches on this core (those of the backward pass have
other shapes; values near and above 100 % are possible). With 150k tokens the head's products are thin, as wide as the
hidden size, which is small so that the whole model stays at ten million parameters: writing the logits costs more
than multiplying, and most of the time goes to products at the rate that they reach in this shape. Cutting them along
the vocabulary too, into tiles that stay in the cache, might help and has not been tried. The rest of the head is an
exponential per logit in each direction. The layers are small as well, and most of their time goes to operations
between their products. In a real model (hidden size of 1024 and more) products should dominate both; that has not
been measured here."""


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
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(directory)
    write_tokenizer(directory, vocabulary)
    return sum(parameter.numel() for parameter in model.parameters())


def write_tokenizer(directory: Path, vocabulary: int) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"<{number}>": number for number in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<0>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<0>", eos_token="<1>").save_pretrained(directory)


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
    """The first update gives the gradient norm and warms everything up; the best of the others counts for time."""
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
    }


def make_ours(
    model_dir: Path, batch: dict[str, Any], length: int, layout: str, *, device: str = "cpu", dtype: str = "auto"
) -> tuple[Any, list[Any]]:
    """Our learner, set to compute what TRL computes, and the batch as it takes it."""
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
        layout=layout,
        dtype=dtype,
        activation_checkpointing=device == "cuda",
    )
    return Learner(model_dir, config, objective, seed=0, device=device), sequences


def run_ours(model_dir: Path, batch: dict[str, Any], length: int, layout: str) -> dict[str, float]:
    learner, sequences = make_ours(model_dir, batch, length, layout)
    return measure(lambda: learner.step(sequences)["learner/grad_norm"], batch["num_tokens"])


class Stopwatch:
    """CPU seconds spent in functions that it was put around."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def timed(*given: Any, **named: Any) -> Any:
            start = time.process_time()
            try:
                return function(*given, **named)
            finally:
                self.seconds += time.process_time() - start

        setattr(owner, name, staticmethod(timed) if isinstance(owner, type) else timed)


def run_parts(model_dir: Path, batch: dict[str, Any], length: int) -> dict[str, float]:
    """CPU seconds of the parts of one update of ours (packed: every token computed once), and their operations."""
    from gspo_core.learner import logprobs, training

    learner, sequences = make_ours(model_dir, batch, length, "packed")
    learner.step(sequences)
    watches = {name: Stopwatch() for name in ("head", "loss and statistics", "optimizer")}
    watches["head"].around(logprobs._ChosenLogprobs, "forward")
    watches["head"].around(logprobs._ChosenLogprobs, "backward")
    watches["loss and statistics"].around(training, "policy_loss")
    watches["optimizer"].around(training, "apply_update")
    start = time.process_time()
    learner.step(sequences)
    total = time.process_time() - start
    parts = {name: watch.seconds for name, watch in watches.items()}
    parts["layers, packing and the rest"] = total - sum(parts.values())
    head, layers = operations(learner._policy.model.config, batch)
    chunk = learner._policy.chunk_tokens
    return {
        **{f"seconds/{name}": seconds for name, seconds in parts.items()},
        "operations/head": head,
        "operations/layers, packing and the rest": layers,
        "rate": product_rate(1024, 1024, 1024),
        "rate_head": product_rate(chunk, learner._policy.head.weight.shape[1], learner._policy.head.weight.shape[0]),
    }


def operations(config: Any, batch: dict[str, Any]) -> tuple[float, float]:
    """Of head and layers, forward and backward; the head's forward product is computed twice instead of kept."""
    hidden, inner = config.hidden_size, config.intermediate_size
    head = layers = 0.0
    weights = hidden * HEAD_DIM * (2 * HEADS + 2 * KEY_HEADS) + 3 * hidden * inner
    for prompt, answer, _ in batch["sequences"]:
        num_tokens = len(prompt) + len(answer) - 1
        head += 4 * 2 * config.vocab_size * hidden * len(answer)
        attention = 2 * 2 * HEADS * HEAD_DIM * num_tokens**2 / 2  # causal: half of all pairs
        layers += 3 * LAYERS * (2 * weights * num_tokens + attention)
    return head, layers


def product_rate(rows: int, inner: int, columns: int) -> float:
    """Floating-point operations per second of CPU time in a float32 product of these sizes, the best of some."""
    import torch

    first, second = torch.randn(rows, inner), torch.randn(columns, inner)
    repeats = max(1, int(2e9 / (2 * rows * inner * columns)))
    best = float("inf")
    for _ in range(5):
        start = time.process_time()
        for _ in range(repeats):
            torch.mm(first, second.t())
        best = min(best, time.process_time() - start)
    return repeats * 2 * rows * inner * columns / best


def padded(batch: dict[str, Any]) -> list[dict[str, Any]]:
    """Micro-batches as TRL makes them: prompts padded on the left, answers on the right."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    def pad(rows: Iterable[list[int]], side: str) -> tuple[Any, Any]:
        tensors = [torch.tensor(row) for row in rows]
        masks = [torch.ones_like(tensor) for tensor in tensors]
        ids, mask = (pad_sequence(given, batch_first=True, padding_side=side) for given in (tensors, masks))
        return ids, mask

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
    return measure(trl_update(model_dir, batch), batch["num_tokens"])


def trl_update(model_dir: Path, batch: dict[str, Any], *, device: str = "cpu") -> Callable[[], float]:
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
        use_cpu=device == "cpu",
        bf16=device != "cpu",
        gradient_checkpointing=device != "cpu",
        report_to=[],
    )
    dataset = Dataset.from_dict({"prompt": ["<2>"] * MEMBERS * GROUPS})
    trainer = GRPOTrainer(str(model_dir), reward_funcs=lambda **_: [], args=args, train_dataset=dataset)
    trainer.create_optimizer_and_scheduler(100)
    trainer.current_gradient_accumulation_steps = len(micro_batches)
    trainer.model.train()

    def update() -> float:
        for micro_batch in micro_batches:
            given = {name: tensor.to(trainer.model.device) for name, tensor in micro_batch.items()}
            loss = trainer.compute_loss(trainer.model, given)
            trainer.accelerator.backward(loss * len(micro_batches))  # which divides it by them again
        norm = torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        trainer.optimizer.step()
        trainer.model.zero_grad()
        return float(norm)

    trainer.accelerator.gradient_accumulation_steps = len(micro_batches)
    return update


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
    elif contestant == "parts":
        result = run_parts(model_dir, batch, length)
    else:
        result = run_ours(model_dir, batch, length, contestant.removeprefix("ours, "))
    print("RESULT " + json.dumps(result))


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
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
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
            parts = run_cell(Path(sys.executable), "parts", model_dir, batch_file, length)
            rows.append(
                {"vocabulary": vocabulary, "length": length, "parameters": parameters, "cells": cells, "parts": parts}
            )
            print(*table(rows[-1:])[2:], *parts_table(rows[-1:])[2:], sep="\n", flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Of all cells, beside TRL's in the same row."""
    lines = [
        "| vocabulary | parameters | longest | | tokens/s | x TRL | peak MiB | x TRL | gradient norm |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        trl = row["cells"].get("trl")
        for name, cell in row["cells"].items():
            start = f"| {row['vocabulary']} | {row['parameters'] / 1e6:.1f} M | {row['length']} | {name} |"
            if cell is None or trl is None:
                lines.append(f"{start} failed | | | | |")
                continue
            speed, memory = cell["tokens_per_s"] / trl["tokens_per_s"], cell["peak_mib"] / trl["peak_mib"]
            numbers = f" {cell['tokens_per_s']:.0f} | {speed:.2f} | {cell['peak_mib']:.0f} | {memory:.2f} |"
            lines.append(f"{start}{numbers} {cell['grad_norm']:.5f} |")
    return lines


def parts_table(rows: list[dict[str, Any]]) -> list[str]:
    """Where our time goes, and how much of each part's time its arithmetic would take at the measured rate."""
    lines = [
        "| vocabulary | longest | part | share of time | its arithmetic at the core's rate | at its shape's rate |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        parts = row["parts"]
        if parts is None:
            continue
        seconds = {name.split("/")[1]: value for name, value in parts.items() if name.startswith("seconds/")}
        total, needed = sum(seconds.values()), 0.0
        start = f"| {row['vocabulary']} | {row['length']} |"
        for name, spent in seconds.items():
            work = parts.get(f"operations/{name}", 0.0) / parts["rate"]
            needed += work
            shaped = work * parts["rate"] / parts["rate_head"] if name == "head" else 0.0
            shares = " | ".join(f"{needs / spent:.0%}" if needs else "-" for needs in (work, shaped))
            lines.append(f"{start} {name} | {spent / total:.0%} | {shares} |")
        lines.append(f"{start} **all** ({total:.2f} s) | 100% | {needed / total:.0%} | - |")
    return lines


def verdict(rows: list[dict[str, Any]]) -> str:
    """What was aimed at, and what was reached."""
    reached: dict[int, list[tuple[float, float]]] = {}
    for row in rows:
        ours, trl = row["cells"].get("ours, shared"), row["cells"].get("trl")
        if ours and trl:
            pair = (ours["tokens_per_s"] / trl["tokens_per_s"], ours["peak_mib"] / trl["peak_mib"])
            reached.setdefault(row["vocabulary"], []).append(pair)
    found = "; ".join(
        f"with {vocabulary} tokens {min(s for s, _ in pairs):.1f} to {max(s for s, _ in pairs):.1f} times its tokens/s "
        f"and {min(m for _, m in pairs):.2f} to {max(m for _, m in pairs):.2f} of its peak memory"
        for vocabulary, pairs in reached.items()
    )
    return (
        "Aimed at beside TRL: 1.5 times its tokens/s, and half of its peak memory at the larger vocabulary. Reached on "
        f"this CPU (`shared`): {found}."
    )


def rates(rows: list[dict[str, Any]]) -> str:
    found = [row["parts"] for row in rows if row["parts"]]
    square = ", ".join(f"{parts['rate'] / 1e9:.0f}" for parts in found)
    head = ", ".join(f"{parts['rate_head'] / 1e9:.0f}" for parts in found)
    return (
        f"A product of 1024 x 1024 matrices ran at {square} GFLOP/s in these processes, one of the head's shape "
        f"(a chunk's rows x width x vocabulary) at {head}."
    )


def report(rows: list[dict[str, Any]]) -> str:
    import torch
    import transformers

    norms = [[cell["grad_norm"] for cell in row["cells"].values() if cell] for row in rows]
    same = all(np.allclose(found, found[0], rtol=1e-3) for found in norms)
    return "\n".join(
        [
            "# One GSPO update: ours, TRL's, plain logits",
            "",
            f"`python -m benchmarks.learner`. torch {torch.__version__}, transformers {transformers.__version__}, "
            f"{TRL}; {platform.machine()}, {os.cpu_count()} cores, one thread used, load average "
            f"{os.getloadavg()[1]:.1f} (other work ran beside it).",
            f"{GROUPS * MEMBERS} sequences, prompts of a quarter of the longest length shared by {MEMBERS}, answers of "
            f"10 to 75 % of it; at most {ROWS} rows (ours: as many tokens) at once; float32. Tokens are those of "
            "prompts and answers, repeated prompts counted each time. Time is CPU time of the process, best of "
            f"{NUM_UPDATES} updates after one to warm up; memory is what updates add to model and batch.",
            f"All compute the same gradient: {'yes' if same else 'NO'}.",
            "",
            *table(rows),
            "",
            verdict(rows),
            "",
            NOTES,
            "",
            "## Where our time goes",
            "",
            f"Layout packed, one update. {rates(rows)}",
            "",
            *parts_table(rows),
            "",
            PARTS_NOTES,
            "",
        ]
    )


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
    if not arguments.quick:
        RESULTS.write_text(report(rows))


if __name__ == "__main__":
    main()
