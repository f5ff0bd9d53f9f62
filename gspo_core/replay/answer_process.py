"""``python -m gspo_core.replay.answer_process FOLDER``: answers the question on stdin about the past in FOLDER.

It runs in its own process, at low priority: the asking process has no torch, and steps take the threads, memory and
random state that the past had. The answer goes to stdout as JSON; stderr has a line for each step that was trained, and
at last the problem if there is one.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from gspo_core.log.changes import ImpossibleChange
from gspo_core.replay import telling
from gspo_core.replay.past import Past, PastError
from gspo_core.replay.question import ReplayQuestion
from gspo_core.replay.replaying import replay

_NICENESS = 5


def main(arguments: list[str]) -> int:
    [folder] = arguments
    os.nice(_NICENESS)
    try:
        question = ReplayQuestion.of(json.load(sys.stdin))
        answer = replay(Past(Path(folder)), question, lambda text: print(text, file=sys.stderr, flush=True))
        if question.single is not None and answer.single is None:
            group, member = question.single
            raise ImpossibleChange(f"episode {group}/{member} was not trained in these steps")
    except (PastError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(telling.as_record(answer), allow_nan=False))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
