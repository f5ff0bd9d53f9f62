"""``python -m gspo_core.replay.state_process FOLDER STEP TARGET``: the learner's state after a step of a job's past.

In a process of its own: it takes threads, memory and random state as the past had them, and leaves none behind. The
state is written to TARGET, and the lineage that goes with it to stdout, as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from gspo_core.replay.journey import arrive
from gspo_core.replay.past import Past, PastError


def main(arguments: list[str]) -> int:
    folder, step, target = arguments
    try:
        arrived = arrive(Past(Path(folder)), int(step), lambda text: print(text, file=sys.stderr, flush=True))
        arrived.learner.save_state(Path(target))
    except (PastError, OSError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(arrived.lineage.to_dict()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
