"""Which models fit which GPUs, by the plan that the learner itself follows?

    python -m benchmarks.what_fits

Nothing runs here: it is the table of docs/plan.md, computed. A test compares the two.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.model_shapes import QWEN3
from gspo_core.learner_config import LearnerOptions, LoraConfig
from gspo_core.plan import LearnerPlace, choose, parse_machines, shape_of
from gspo_core.plan.machines import GIB

RESULTS = Path(__file__).parent / "results" / "what_fits.md"
LONGEST = 8192
WHOLE = ("1xH100", "2xH100", "4xH100", "8xH100", "16xH100", "8xH200")
ADDITIONS = ("1xH100", "2xH100", "8xH100")


def cell(name: str, gpus: str, lora: LoraConfig | None = None) -> str:
    machines = parse_machines(gpus)
    place = LearnerPlace(machines.num_devices, "cuda", machines.device.usable_bytes, longest=LONGEST)
    choice = choose(shape_of(QWEN3[name]), LearnerOptions(lora=lora), place)
    if not choice.fits:
        return "-"
    recomputed = ", r" if choice.activation_checkpointing else ""
    return f"{choice.peak.device_total / GIB:.0f} ({choice.micro_batch_tokens // 1024}k{recomputed})"


def table() -> list[str]:
    head = ["model", *WHOLE, *(f"{gpus}, low rank" for gpus in ADDITIONS)]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    lora = LoraConfig(base_dtype="bfloat16")
    for name in QWEN3:
        cells = [cell(name, gpus) for gpus in WHOLE] + [cell(name, gpus, lora) for gpus in ADDITIONS]
        lines.append(f"| {' | '.join([name, *cells])} |")
    return lines


def main() -> None:
    text = "\n".join(table())
    RESULTS.write_text(
        "# Which models fit which GPUs\n\nComputed by `gspo_core.plan`, not measured: no GPU took part. "
        "How to read it: [docs/plan.md](../../docs/plan.md).\n\n" + text + "\n"
    )
    print(text)


if __name__ == "__main__":
    main()
