"""Does the calculator job learn on a real SGLang, or vLLM, as on the embedded engine, with weights updated in flight?

Run: ``python -m benchmarks.sglang_learning [--kind vllm] [--steps 50] [--seed 0]`` after ``make sglang-cpu`` or
``make vllm-cpu``. Writes both curves and what was measured of both to ``benchmarks/results/sglang_learning.*`` or
``vllm_learning.*``: minutes, one after the other. With ``--weight-transport group`` (SGLang) the weights go through a
process group, to ``sglang_learning_group.*``. With ``--alone`` the embedded engine is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from examples.demo.demo import demo_spec, run_demo
from examples.demo.model import make_demo_model
from examples.demo.report import DemoResult, moving_average
from services.files.data_dir import DataDir
from tests.apparatus.sglang_process import SGLangProcess
from tests.apparatus.vllm_process import VllmProcess

RESULTS = Path(__file__).parent / "results"
SERVERS: Mapping[str, type[SGLangProcess | VllmProcess]] = {"sglang": SGLangProcess, "vllm": VllmProcess}
NAMES = {"sglang": "SGLang 0.5.23", "vllm": "vLLM 0.32.0"}


def train(
    engine: str, root: Path, model_dir: Path, arguments: argparse.Namespace
) -> tuple[DemoResult, dict[str, float]]:
    """The job on one kind of engine, and what its steps say of the engines."""
    data_dir = root / engine
    data_dir.mkdir()
    spec = demo_spec(model_dir, arguments.seed, arguments.steps)
    rollout = spec.rollout.model_copy(update={"weight_transport": arguments.weight_transport})
    spec = spec.model_copy(update={"rollout": rollout})
    if engine == "embedded":
        result = run_demo(spec, data_dir, model_dir)
    else:
        venv = arguments.venv or Path(f".venv-{engine}")
        server = SERVERS[engine](venv, model_dir, data_dir / f"{engine}.log")
        try:
            result = run_demo(spec, data_dir, model_dir, engine_urls=(server.url,))
        finally:
            server.close()
    lines = DataDir(data_dir).jobs.job(result.job).metrics.read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return result, engine_metrics([record for record in records if "version" in record])  # others are evaluations


def engine_metrics(steps: list[Mapping[str, Any]]) -> dict[str, float]:
    last = steps[-1]
    return {
        "largest k3 of a scoring": max(float(step.get("engine/k3", 0.0)) for step in steps),
        "paused, s": float(last["engine/paused_s"]),
        "tokens prefilled again": float(last["engine/tokens_prefilled_again"]),
        "tokens lost": float(last["engine/tokens_lost"]),
    }


def plot(results: Mapping[str, DemoResult], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for (name, result), color in zip(results.items(), ("#2a9d8f", "#e76f51"), strict=False):
        steps = range(1, len(result.rewards) + 1)
        axes.plot(steps, moving_average(result.rewards), color=color, label=f"{name}: training episodes")
        axes.plot(*zip(*result.evaluations, strict=True), "o--", color=color, label=f"{name}: held-out tasks")
    axes.set(xlabel="step", ylabel="success", ylim=(0, 1.1), title="The calculator job on two engines")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def report(
    results: Mapping[str, DemoResult], engines: Mapping[str, Mapping[str, float]], arguments: argparse.Namespace
) -> str:
    name, seed, transport = NAMES[arguments.kind], arguments.seed, arguments.weight_transport
    lines = [
        f"# The calculator job on a real {name.split()[0]}{' and on the embedded engine' * (len(results) > 1)}\n",
        f"{name} on the CPU, float32, one thread; seed {seed}; weights by {transport}; {os.cpu_count()} logical "
        f"CPUs, load average {os.getloadavg()[0]:.1f} at the end. The times say nothing of GPUs.\n",
        f"| | {' | '.join(results)} |",
        f"|---|{'---|' * len(results)}",
    ]

    def row(name: str, values: list[str]) -> None:
        lines.append(f"| {name} | {' | '.join(values)} |")

    runs = list(results.values())
    row("held-out success before", [f"{one.before:.0%}" for one in runs])
    row(f"after {runs[0].steps} steps", [f"{one.after:.0%}" for one in runs])
    row("training, s", [f"{one.training_s:.0f}" for one in runs])
    row("episodes of several versions", [f"{one.mixed_versions_share:.0%}" for one in runs])
    row("mean staleness, steps", [f"{one.staleness_mean:.2f}" for one in runs])
    row("tokens true under their version", [f"{o.provenance.num_equal}/{o.provenance.num_tokens}" for o in runs])
    row("largest difference", [f"{one.provenance.largest_difference:.1e}" for one in runs])
    for name in next(iter(engines.values())):
        row(name, [f"{engines[engine][name]:.3g}" for engine in results])
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=sorted(SERVERS), default="sglang")
    parser.add_argument("--alone", action="store_true", help="without the embedded engine beside it")
    parser.add_argument("--venv", type=Path, help="environment of the engine (default: .venv-KIND)")
    parser.add_argument("--model", type=Path, help="where the demo's model lies, or is to be made")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--weight-transport", choices=["disk", "group"], default="disk")
    arguments = parser.parse_args()
    results: dict[str, DemoResult] = {}
    engines: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        model_dir = arguments.model or root / "model"
        make_demo_model(model_dir)  # nothing to do where it is there
        for name in [arguments.kind] if arguments.alone else ["embedded", arguments.kind]:
            results[name], engines[name] = train(name, root, model_dir, arguments)
    written = RESULTS / f"{arguments.kind}_learning{'_group' * (arguments.weight_transport == 'group')}"
    plot(results, written.with_suffix(".png"))
    written.with_suffix(".json").write_text(
        json.dumps({name: asdict(one) | {"engine": engines[name]} for name, one in results.items()}, indent=1) + "\n"
    )
    text = report(results, engines, arguments)
    written.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
