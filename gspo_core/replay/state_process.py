"""``python -m gspo_core.replay.state_process FOLDER STEP TARGET``: the learner's state after a step of a job's past.

In a process of its own: it takes threads, memory and random state as the past had them, and leaves none behind. The
state is written to TARGET, and the lineage that goes with it to stdout, as JSON. It ends with ``DAMAGED`` where the
past is damaged or does not reach there, with ``UNSUPPORTED`` where its model cannot be trained; any other failure may
be gone the next time.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from gspo_core.learner import UnsupportedModel
from gspo_core.replay.journey import arrive
from gspo_core.replay.past import Past, PastError

# Python itself ends with 1, 2 and 120.
DAMAGED, UNSUPPORTED = 65, 66


def main(arguments: list[str]) -> int:
    folder, step, target = arguments
    try:
        arrived = arrive(Past(Path(folder)), int(step), lambda text: print(text, file=sys.stderr, flush=True))
        arrived.learner.save_state(Path(target))
    except UnsupportedModel as error:
        print(error, file=sys.stderr)
        return UNSUPPORTED
    except (PastError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return DAMAGED
    print(json.dumps(arrived.lineage.to_dict()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
