"""``make gpu-check``, or ``python -m benchmarks.gpu_check [--trl PYTHON]``: what passed, and how fast it was.

Ends with 0 where everything that could run passed, with 1 where something failed, and with 77 where nothing ran
because there is no GPU. `--device cpu` runs on the CPU what does not need a GPU, which says nothing about one.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.gpu_check.check import SKIPPED, Check, Place, run_checks, status_of
from benchmarks.gpu_check.one import attention, head, memory, resuming, steps
from benchmarks.gpu_check.rate import rate
from benchmarks.gpu_check.sending import sending
from benchmarks.gpu_check.several import arranged

CHECKS = (
    Check("attention of packed rows", attention),
    Check("head", head),
    Check("two steps", steps),
    Check("resuming", resuming),
    Check("memory beside the plan", memory),
    Check("weights sent to an engine", sending, 2),
    Check("two ranks", arranged(2), 2),
    Check("two ranks share sequences", arranged(2, context_parallel=2), 2),
    Check("four ranks share sequences", arranged(4, context_parallel=4), 4),
    Check("two copies on four ranks", arranged(4, replicas=2), 4),
    Check("rate", rate),
)
NEEDS_A_GPU = ("memory beside the plan", "rate")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", type=Path, metavar="PYTHON", help="an interpreter that has TRL, to be measured beside")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, default=2, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    checks: tuple[Check, ...] = CHECKS
    if given.device == "cpu":
        print("on the CPU: this tests the checks, and says nothing about a GPU")
        checks = tuple(one for one in CHECKS if one.name not in NEEDS_A_GPU)
    elif not torch.cuda.is_available():
        print(f"there is no GPU that torch {torch.__version__} can use: none of {len(CHECKS)} checks ran")
        return SKIPPED
    else:
        print(f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, torch {torch.__version__}")
        # repeatable products, where torch has them
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    number = given.ranks if given.device == "cpu" else torch.cuda.device_count()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for result in run_checks(checks, Place(number, Path(folder), given.device, given.trl)):
            print(result, flush=True)
            results.append(result)
    return status_of(results)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
