"""How much memory does a rank of the learner need, beside what `gspo plan` says, and does it need the whole model?

    python -m benchmarks.learner_memory shapes [--seed N] [--start N]
    python -m benchmarks.learner_memory ranks

`shapes`: models, settings and batches drawn by a seed; each is a process of its own with one thread, which loads the
model and takes one step of several micro-batches. What it needed is the highest resident size (the kernel's own
high-water mark) over what the process had after it had trained a tiny model of the same kind; the allocator gives
freed memory back at once.

`ranks`: one model on 1, 2, 4 and 8 gloo ranks. While they load, each rank is in a memory control group of its own that
allows it less than the model takes in float32. One rank under the same limit is killed, which shows that the limit
acts. All must report the same gradient norm and weights, and another number of ranks goes on from the state that four
have written.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results" / "learner_memory.md"
MIB = 2**20
NUM_SHAPES = 20
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "GLOO_SOCKET_IFNAME": "lo",
    "TOKENIZERS_PARALLELISM": "false",
}
# Of each rank: in the second one there are the gradients of the first.
NUM_MICRO_BATCHES = 2
MOST_RANKS = 8
RANKED: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 4096,
}


def drawn(seed: int) -> list[dict[str, Any]]:
    """Cases: a model, and what is asked of its learner."""
    rng = np.random.default_rng(seed)
    cases = []
    for number in range(NUM_SHAPES):
        hidden = int(rng.choice([256, 384, 512]))
        family = str(rng.choice(["Qwen3", "Qwen3", "Qwen2", "Llama", "Qwen3Moe"]))
        model = {
            "hidden_size": hidden,
            "intermediate_size": int(hidden * rng.choice([2, 3, 4])),
            "num_hidden_layers": int(rng.integers(3, 9)),
            "num_attention_heads": hidden // 64,
            "num_key_value_heads": int(rng.choice([1, hidden // 64])),
            "head_dim": 64,
            "vocab_size": int(rng.choice([4_096, 16_384, 65_536])),
            "tie_word_embeddings": bool(rng.random() < 0.5),
            "max_position_embeddings": 8192,
        }
        if family == "Qwen2":
            del model["head_dim"]
        if family == "Qwen3Moe":
            model |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": hidden // 2}
        learner: dict[str, Any] = {
            "micro_batch_tokens": int(rng.choice([256, 512, 1024])),
            "activation_checkpointing": bool(rng.random() < 0.3),
            "dtype": "bfloat16" if rng.random() < 0.15 else "float32",
        }
        if family != "Qwen3Moe" and rng.random() < 0.2:
            learner["lora"] = {"rank": 16}
        cases.append(
            {
                "number": number,
                "family": family,
                "model": model,
                "learner": learner,
                "kl_coef": float(rng.choice([0.0, 0.0, 0.1])),
            }
        )
    return cases


# --- in a process of its own


def reset_high_water() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def resident(name: str = "VmHWM") -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status holds no {name}")


def sequences(num_tokens: int, length: int, vocabulary: int) -> list[Any]:
    from gspo_core.batch import TrainSequence

    rng = np.random.default_rng(0)
    found = []
    for number in range(num_tokens // length):
        acts, zeros = np.arange(length) > 0, np.zeros(length, np.int32)
        ids = rng.integers(0, vocabulary, length, dtype=np.int32)
        found.append(
            TrainSequence(ids, acts, np.full(length, -5.0, np.float32), zeros, zeros, 1.0 if number % 2 else -1.0)
        )
    return found


def make_learner(model_dir: Path, options: dict[str, Any], kl_coef: float) -> Any:
    from gspo_core.learner import Learner
    from gspo_core.learner_config import LearnerConfig, OptimizerConfig
    from gspo_core.objective_config import ObjectiveConfig

    gates = {"k3_gate": None, "outlier_gate": None, "off_policy_gate": None}
    objective = ObjectiveConfig(minibatches=1, kl_coef=kl_coef, **gates)
    config = LearnerConfig(optimizer=OptimizerConfig(lr=1e-4), layout="packed", **options)
    return Learner(model_dir, config, objective, seed=0)


def run_shape(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    import torch

    from gspo_core.plan import LearnerPlace, choose, read_shape
    from gspo_core.plan.memory import peak
    from tests.core.learner_support import write_model

    torch.set_num_threads(1)
    tiny = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 128,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
    }
    options, tokens = case["learner"], case["learner"]["micro_batch_tokens"]
    write_model(folder / "tiny", case["family"], **{**case["model"], **tiny})
    write_model(folder / "model", case["family"], **{**case["model"], "initializer_range": 0.02})
    make_learner(folder / "tiny", options, case["kl_coef"]).step(sequences(1024, 256, 128))
    before = resident("VmRSS")
    learner = make_learner(folder / "model", options, case["kl_coef"])
    batch = sequences(NUM_MICRO_BATCHES * tokens, 256, case["model"]["vocab_size"])
    for _ in range(2):  # from the second step on there are moments
        reset_high_water()
        learner.step(batch)
    place = LearnerPlace(1, "cpu", 0, has_reference=bool(case["kl_coef"]))
    planned = peak(choose(read_shape(folder / "model"), learner.config, place).phases)
    return {**case, "needed": resident() - before, "planned": planned.device_total, "phase": planned.phase}


def run_rank(folder: Path, limit: int, group: str, *, goes_on: bool) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        report = _as_a_rank(folder, limit, Path(group), goes_on=goes_on)
        (folder / f"rank-{dist.get_world_size()}-{dist.get_rank()}.json").write_text(json.dumps(report))
    finally:
        dist.destroy_process_group()


def _as_a_rank(folder: Path, limit: int, group: Path, *, goes_on: bool) -> dict[str, Any]:
    import torch.distributed as dist

    from gspo_core.plan import Setting, plan_memory, read_shape

    num_ranks = dist.get_world_size()
    make_learner(folder / "tiny", {"micro_batch_tokens": 64}, 0.0).step(sequences(512, 64, 64))
    before = resident("VmRSS")
    groups = groups_at(group)
    limited = groups.enter(f"rank-{num_ranks}-{dist.get_rank()}", limit) if limit else None
    reset_high_water()
    learner = make_learner(folder / "model", {"micro_batch_tokens": 64}, 0.0)
    found: dict[str, Any] = {"loading": resident() - before, "held": resident("VmRSS") - before}
    if limited is not None:
        limited.write_text(groups.no_limit)
    batch = sequences(NUM_MICRO_BATCHES * MOST_RANKS * 64, 16, RANKED["vocab_size"])
    if goes_on:
        learner.load_state(folder / "state-4")
        found["resumed"] = {**learner.step(batch)}
        return found
    reset_high_water()
    metrics = [learner.step(batch) for _ in range(2)]
    found |= {"step": resident() - before, "metrics": metrics[-1]}
    reset_high_water()
    learner.save_weights(folder / f"weights-{num_ranks}")
    found["publish"] = resident() - before
    learner.save_state(folder / f"state-{num_ranks}")
    found["next"] = {**learner.step(batch)}
    phases = plan_memory(
        Setting(read_shape(folder / "model"), num_ranks=num_ranks, device="cpu", is_half=False, tokens=64)
    )
    found["planned"] = {one.phase: one.device_total + one.host_total for one in phases}
    return found


# --- the report


@dataclass(frozen=True)
class MemoryGroups:
    """Control groups of memory below one of this process's own, a file system of the kernel (version 1 or 2)."""

    parent: Path
    limit: str
    """Name of the file that holds a group's limit."""
    no_limit: str

    def enter(self, name: str, limit: int) -> Path:
        own = self.parent / name
        own.mkdir(exist_ok=True)
        (own / self.limit).write_text(str(limit))
        (own / "cgroup.procs").write_text(str(os.getpid()))
        return own / self.limit


CGROUPS = Path("/sys/fs/cgroup")


def groups_at(parent: Path) -> MemoryGroups:
    if (CGROUPS / "cgroup.controllers").exists():
        return MemoryGroups(parent, "memory.max", "max")
    return MemoryGroups(parent, "memory.limit_in_bytes", "-1")


@contextlib.contextmanager
def memory_group() -> Iterator[Path]:
    """A memory control group of this process's own, for the groups of its ranks."""
    if (CGROUPS / "cgroup.controllers").exists():  # at the root, because a group that holds processes has no children
        group = CGROUPS / f"gspo-{os.getpid()}"
    else:
        mine = Path("/proc/self/cgroup").read_text().splitlines()
        own = next(line.split(":")[2] for line in mine if ":memory:" in line)
        group = CGROUPS / "memory" / own.strip("/") / f"gspo-{os.getpid()}"
    group.mkdir()
    if groups_at(group).limit == "memory.max":
        (group / "cgroup.subtree_control").write_text("+memory")
    try:
        yield group
    finally:
        for one in [*group.iterdir()]:
            if one.is_dir():
                one.rmdir()
        group.rmdir()


def spawn(*arguments: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *launcher, "-m", "benchmarks.learner_memory", *arguments]
    return subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=False)


def shapes(seed: int, start: int) -> list[str]:
    lines = [
        f"Seed {seed}. {conditions()}",
        "",
        "| model | parameters of the step | needed, MiB | planned, MiB | planned/needed | highest in |",
        "|---|---|---|---|---|---|",
    ]
    for case in drawn(seed)[start:]:
        with tempfile.TemporaryDirectory() as folder:
            done = spawn("one-shape", json.dumps(case), folder)
        if done.returncode:
            print(done.stderr[-2000:], file=sys.stderr)
            lines.append(f"| {case['family']} {case['number']} | failed | | | | |")
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        lines.append(shape_row(found))
        print(lines[-1], flush=True)
    return lines


def shape_row(found: dict[str, Any]) -> str:
    model, learner = found["model"], found["learner"]
    name = f"{found['family']} {model['hidden_size']}x{model['num_hidden_layers']}, vocabulary {model['vocab_size']}"
    asked = [f"{learner['micro_batch_tokens']} tokens", learner["dtype"]]
    asked += ["recomputed"] if learner["activation_checkpointing"] else []
    asked += ["low rank"] if "lora" in learner else []
    asked += ["reference"] if found["kl_coef"] else []
    needed, planned = found["needed"] / MIB, found["planned"] / MIB
    return f"| {name} | {', '.join(asked)} | {needed:.0f} | {planned:.0f} | {planned / needed:.2f} | {found['phase']} |"


def ranks() -> list[str]:
    from tests.core.learner_support import write_model

    lines = [conditions(), ""]
    with tempfile.TemporaryDirectory() as name, memory_group() as group:
        folder = Path(name)
        write_model(folder / "tiny", vocab_size=64, head_dim=64)
        write_model(folder / "model", **{**RANKED, "initializer_range": 0.02})
        size = (folder / "model" / "model.safetensors").stat().st_size
        limit = int(LIMIT_SHARE * size)
        lines += [f"The model takes {size / MIB:.0f} MiB in float32, the limit of a rank is {limit / MIB:.0f} MiB.", ""]
        lines += ["| ranks | loading, MiB | planned | step | planned | publishing | planned | norm | next norm |"]
        lines += ["|---|---|---|---|---|---|---|---|---|"]
        for num_ranks in (1, 2, 4, 8):
            lines += one_number(folder, group, num_ranks, limit)
            print(lines[-1], flush=True)
        for line in (*killed(folder, group, limit), *resumed(folder, group), *same_weights(folder)):
            print(line, flush=True)
            lines.append(line)
    return lines


def one_number(folder: Path, group: Path, num_ranks: int, limit: int) -> list[str]:
    done = launch(folder, group, num_ranks, limit if num_ranks > 1 else 0)
    if done.returncode:
        return [f"{num_ranks} ranks: failed: {done.stderr[-800:]}"]
    found = [json.loads((folder / f"rank-{num_ranks}-{rank}.json").read_text()) for rank in range(num_ranks)]
    worst = {key: max(one[key] for one in found) / MIB for key in ("loading", "held", "step", "publish")}
    planned = {key: value / MIB for key, value in found[0]["planned"].items()}
    step = max(planned["forward and backward"], planned["update"])
    norms = [found[0][one]["learner/grad_norm"] for one in ("metrics", "next")]
    return [
        f"| {num_ranks} | {worst['loading']:.0f} | {planned['load']:.0f} | {worst['step']:.0f} | {step:.0f} "
        f"| {worst['publish']:.0f} | {planned['publish']:.0f} | {norms[0]:.7f} | {norms[1]:.7f} |"
    ]


def killed(folder: Path, group: Path, limit: int) -> Iterator[str]:
    done = launch(folder, group, 1, limit)
    yield f"One rank under the limit: {'killed' if 'SIGKILL' in done.stderr else f'ended with {done.returncode}'}."


# Of the model's size in float32: what a rank may take once it loads.
LIMIT_SHARE = 0.95


def launch(folder: Path, group: Path, num_ranks: int, limit: int, *more: str) -> subprocess.CompletedProcess[str]:
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks))
    rank = ("benchmarks.learner_memory", "one-rank", str(folder), str(limit), str(group), *more)
    command = [sys.executable, "-m", *launcher, "-m", *rank]
    return subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=False)


def resumed(folder: Path, group: Path) -> list[str]:
    lines = []
    for num_ranks in (2, 8):
        done = launch(folder, group, num_ranks, 0, "go-on")
        path = folder / f"rank-{num_ranks}-0.json"
        said = json.loads(path.read_text()).get("resumed", {}) if not done.returncode else {}
        lines.append(f"{num_ranks} ranks from the state of 4: next gradient norm {said.get('learner/grad_norm')}")
    return lines


def same_weights(folder: Path) -> list[str]:
    from safetensors.torch import load_file

    def read(where: Path) -> dict[str, Any]:
        return {name: value for path in sorted(where.glob("*.safetensors")) for name, value in load_file(path).items()}

    start, one = read(folder / "model"), read(folder / "weights-1")
    moved = max(float((one[name] - start[name]).abs().max()) for name in one)
    lines = []
    for num_ranks in (2, 4, 8):
        other = read(folder / f"weights-{num_ranks}")
        apart = max(float((one[name] - other[name]).abs().max()) for name in one)
        lines.append(f"weights of {num_ranks} ranks: {apart / moved:.2g} of what they moved apart from those of one")
    return lines


def conditions() -> str:
    import torch
    import transformers

    return (
        f"torch {torch.__version__}, transformers {transformers.__version__}, {platform.machine()}, one thread a "
        f"process, float32 unless said, load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["shapes", "ranks", "one-shape", "one-rank"])
    parser.add_argument("rest", nargs="*")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="leave out the shapes before this one")
    arguments = parser.parse_args()
    if arguments.what == "one-shape":
        print(json.dumps(run_shape(json.loads(arguments.rest[0]), Path(arguments.rest[1]))))
    elif arguments.what == "one-rank":
        run_rank(Path(arguments.rest[0]), int(arguments.rest[1]), arguments.rest[2], goes_on=len(arguments.rest) > 3)
    else:
        lines = shapes(arguments.seed, arguments.start) if arguments.what == "shapes" else ranks()
        print("\n".join(lines))


if __name__ == "__main__":
    main()
