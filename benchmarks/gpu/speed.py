"""How much of a device's rate does an update use, beside a plain loop of transformers with the same kernels?

MFU counts the operations that an update cannot do without, over the maker's dense bfloat16 rate: six for each weight
that takes part and each token (forward, and twice as much backward), and those of attention over what is before a
token. What is computed twice to spare memory does not count. Both sides have masters in float32, compute in bfloat16,
recompute layers, attend by torch's own kernel, and see the same sequences of one length, which share no prompt.
"""

from __future__ import annotations

import contextlib
import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.check import Check, Differs, Found, Place
from benchmarks.gpu.memory import OPEN
from benchmarks.gpu.models import model_at, sequences_of
from benchmarks.gpu.rate import rate as beside_trl
from gspo_core.batch import TrainSequence
from gspo_core.bounds import exceeds
from gspo_core.learner import Learner
from gspo_core.learner_config import LearnerConfig, OptimizerConfig
from gspo_core.objective_config import ObjectiveConfig
from gspo_core.plan import read_shape
from gspo_core.plan.machines import DEVICES

SHAPES = (("Qwen3-0.6B", 2048), ("Qwen3-0.6B", 8192), ("Qwen3-1.7B", 8192), ("Qwen3-4B", 8192))
TOY_LENGTH = 64
TOKENS_AT_ONCE, TOKENS = 16_384, 32_768
NUM_UPDATES = 3
NORM_BOUND = 0.05
"""Of the gradient's norm: both computed the same."""


def operations(directory: Path, length: int) -> float:
    """That an update cannot do without, a token."""
    shape = read_shape(directory)
    return 3 * (2 * shape.num_active() + 4 * shape.num_layers * shape.queries * length / 2)


def peak_rate(device: str) -> float | None:
    name = torch.cuda.get_device_name() if device == "cuda" else ""
    known = [one.flops for key, one in DEVICES.items() if key.split("-")[0] in name.lower().replace(" ", "")]
    return known[0] if known else None


def prepare(place: Place) -> None:
    for model, _ in SHAPES:
        model_at(place, model)


def timed(update: Callable[[], object], place: Place) -> float:
    """The median time of some updates, of which none is the first."""
    seconds = []
    for _ in range(NUM_UPDATES):
        wait(place)
        began = time.perf_counter()
        update()
        wait(place)
        seconds.append(time.perf_counter() - began)
    return sorted(seconds)[len(seconds) // 2]


def wait(place: Place) -> None:
    if place.device == "cuda":
        torch.cuda.synchronize()


def our_learner(directory: Path, length: int, place: Place) -> Learner:
    config = LearnerConfig(
        optimizer=OptimizerConfig(lr=1e-6, max_grad_norm=None),
        micro_batch_tokens=max(length, TOKENS_AT_ONCE),
        dtype="bfloat16",
        layout="packed",
        activation_checkpointing=True,
    )
    objective = ObjectiveConfig(minibatches=1, correction="none", **OPEN)
    return Learner(directory, config, objective, seed=0, device=place.device)


def plain_update(directory: Path, batch: list[TrainSequence], place: Place) -> Callable[[], float]:
    """The loop that one writes first: a few rows at once, all logits, the loss written down."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="sdpa"
    ).to(place.device)
    enable = getattr(model, "activation_checkpointing_enable", None)  # its name in newer releases
    (enable or model.gradient_checkpointing_enable)()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)

    at_once = min(len(batch), max(1, TOKENS_AT_ONCE // batch[0].num_tokens))

    def update() -> float:
        nonlocal at_once
        while True:
            try:
                return update_in_parts()
            except torch.OutOfMemoryError:
                if at_once == 1:
                    raise
            at_once //= 2
            optimizer.zero_grad()
            _empty(place)

    def update_in_parts() -> float:
        for first in range(0, len(batch), at_once):
            rows = batch[first : first + at_once]
            ids = torch.stack([torch.from_numpy(one.token_ids.astype("int64")) for one in rows]).to(place.device)
            mask = torch.stack([torch.from_numpy(one.action_mask[1:]) for one in rows]).to(place.device)
            advantages = torch.tensor([float(one.advantages) for one in rows], device=place.device)
            with torch.autocast(place.device, torch.bfloat16):
                logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
            scored = logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
            mean_log_ratio = ((scored - scored.detach()) * mask).sum(-1) / mask.sum(-1)
            (-(mean_log_ratio.exp() * advantages).sum() / len(batch)).backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
        return float(norm)

    return update


def rate(model: str, length: int) -> Check:
    def run(place: Place) -> Found:
        directory = model_at(place, model)
        size = TOY_LENGTH if place.is_toy else length
        num_tokens = 4 * size if place.is_toy else TOKENS
        batch = sequences_of(num_tokens // size, size, read_shape(directory).vocabulary)
        profiled = place.kept / f"profile-{model}-{size}.json"
        numbers = _ours(directory, batch, num_tokens, place, profiled)
        _empty(place)
        numbers |= _beside(directory, batch, num_tokens, place)
        said = f"{numbers['tokens_per_s']:.0f} tokens/s"
        if (peak := peak_rate(place.device)) is not None:
            numbers["mfu"] = numbers["tokens_per_s"] * operations(directory, size) / peak
            said += f", MFU {numbers['mfu']:.1%}"
        if "plain_tokens_per_s" in numbers:
            said += f"; a plain loop {numbers['plain_tokens_per_s']:.0f} tokens/s"
            if exceeds(abs(numbers["plain_norm"] / numbers["norm"] - 1), NORM_BOUND):
                norms = f"{numbers['norm']:.4g} and {numbers['plain_norm']:.4g}"
                raise Differs(f"they do not compute the same: norms {norms}; {said}")
        else:
            said += "; a plain loop ran out of memory with a single row, so norms were not compared"
        return Found(said, numbers)

    return Check(f"{model}, {length} tokens", run)


def _ours(
    directory: Path, batch: list[TrainSequence], num_tokens: int, place: Place, profiled: Path
) -> dict[str, float]:
    learner = our_learner(directory, batch[0].num_tokens, place)
    try:
        with _allocations(place) as sizes:
            norm = float(learner.step(batch)["learner/grad_norm"])
        numbers = {"tokens_per_s": num_tokens / timed(lambda: learner.step(batch), place), "norm": norm}
        if place.device == "cuda":
            numbers["largest_allocation"] = float(_without_all_logits(sizes, directory, _scored_at_once(batch)))
            _profile(learner, batch, profiled, numbers)
        return numbers
    finally:
        learner.close()


def _beside(directory: Path, batch: list[TrainSequence], num_tokens: int, place: Place) -> dict[str, float]:
    try:
        update = plain_update(directory, batch, place)
        norm, seconds = update(), timed(update, place)
    except torch.OutOfMemoryError:
        return {}  # one row alone is too much
    finally:
        _empty(place)
    return {"plain_tokens_per_s": num_tokens / seconds, "plain_norm": norm}


def _empty(place: Place) -> None:
    gc.collect()
    if place.device == "cuda":
        torch.cuda.empty_cache()


def _scored_at_once(batch: Sequence[TrainSequence]) -> int:
    rows = max(1, TOKENS_AT_ONCE // batch[0].num_tokens)
    return sum(one.num_actions for one in batch[:rows])


@contextlib.contextmanager
def _allocations(place: Place) -> Iterator[list[int]]:
    """The sizes of all that the device allocates meanwhile."""
    sizes: list[int] = []
    if place.device != "cuda":
        yield sizes
        return
    # sizes alone: who allocated what would cost more than the update
    torch.cuda.memory._record_memory_history(context=None, stacks="python", max_entries=1_000_000)
    try:
        yield sizes
    finally:
        snapshot: dict[str, Any] = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(enabled=None)
        sizes += [one["size"] for trace in snapshot["device_traces"] for one in trace if one["action"] == "alloc"]


def _without_all_logits(sizes: Sequence[int], directory: Path, num_scored: int) -> int:
    """The largest of them, which is smaller than all logits of a micro-batch's scored tokens in bfloat16."""
    whole = 2 * num_scored * read_shape(directory).vocabulary
    largest = max(sizes, default=0)
    if not 0 < largest < whole:
        raise Differs(f"{largest / 2**30:.1f} GiB at once: all logits of a micro-batch take {whole / 2**30:.1f}")
    return largest


KINDS = {
    "products": ("gemm", "cutlass", "nvjet", "cublas", "xmma"),
    "attention": ("flash", "fmha", "attention", "flex"),
    "copies": ("memcpy", "memset", "copy"),
}


def _profile(learner: Learner, batch: list[TrainSequence], path: Path, numbers: dict[str, float]) -> None:
    """Where the device's time goes in one step, by kind of kernel."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        began = time.perf_counter()
        learner.step(batch)
        torch.cuda.synchronize()
        whole = time.perf_counter() - began
    spent: dict[str, float] = dict.fromkeys((*KINDS, "others"), 0.0)
    kernels = []
    for event in found.key_averages():
        seconds = event.self_device_time_total / 1e6
        if seconds and event.device_type.name == "CUDA" and not event.is_user_annotation:
            kind = next((kind for kind, words in KINDS.items() if any(w in event.key.lower() for w in words)), "others")
            spent[kind] += seconds
            kernels.append((seconds, event.count, event.key))
    numbers |= {f"share of {kind}": seconds / whole for kind, seconds in spent.items()}
    numbers["share in which the device computes"] = sum(spent.values()) / whole
    path.write_text(json.dumps({"seconds": whole, "kernels": sorted(kernels, reverse=True)[:60]}, indent=1))


CHECKS = (*(rate(model, length) for model, length in SHAPES), Check("beside TRL", beside_trl))
