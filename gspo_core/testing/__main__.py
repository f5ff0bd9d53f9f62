"""``python -m gspo_core.testing ORDER``: the checks in a process of their own, as `gspo env validate` starts them.

Rule: what an environment prints is not mixed with the report, and an environment that ends its process ends only this
one. ``ORDER`` is JSON; the report is written, as JSON, to the descriptor that it names.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from gspo_core.testing.watch import validate


def main() -> None:
    order = json.loads(sys.argv[1])
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    model = Path(order["model"]) if order["model"] else None
    report = validate(order["ref"], order["config"], model=model, timeout_s=order["timeout_s"])
    with os.fdopen(order["descriptor"], "w", encoding="utf-8") as file:
        json.dump(report.to_json(), file)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # nobody waits for what hangs


if __name__ == "__main__":
    main()
