"""How long a command waits for the light half of the library: ``python -m benchmarks.import_time``.

Each number is the median of fresh processes, without the start of the interpreter: wall clock, and processor time,
which other load on the machine does not change much. Aim: the line with all three modules under 150 ms. pydantic is
paid by who first uses a job's specification, which the last line shows.
"""

from __future__ import annotations

import statistics
import subprocess
import sys

RUNS = 9
THREE = "import gspo_core.env, gspo_core.spec, gspo_core.types"
STATEMENTS = (
    "from pydantic import BaseModel, Field, JsonValue, model_validator",
    "import gspo_core.types",
    "import gspo_core.client",
    THREE,
    f"{THREE}; gspo_core.spec.JobSpec",
)
AIM_MS = 150.0


def import_ms(statement: str) -> tuple[float, float]:
    """Wall-clock and processor time of one import statement in a process of its own."""
    code = (
        "import time\nwall, cpu = time.perf_counter(), time.process_time()\n"
        f"{statement}\nprint(time.perf_counter() - wall, time.process_time() - cpu)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    wall, cpu = (1000 * float(part) for part in shown.stdout.split())
    return wall, cpu


def main() -> None:
    print("wall ms   cpu ms   best cpu ms")
    for statement in STATEMENTS:
        walls, cpus = zip(*(import_ms(statement) for _ in range(RUNS)), strict=True)
        print(f"{statistics.median(walls):7.1f}  {statistics.median(cpus):7.1f}  {min(cpus):12.1f}   {statement}")
    print(f"aim: {AIM_MS:.0f} ms for all three modules")


if __name__ == "__main__":
    main()
