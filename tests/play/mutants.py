"""``python -m tests.play.mutants [--seed N] [NAME ...]``: known ways to build the gateway wrongly, each noticed by a
short play.

Each is the tree with one line changed, in a copy; the stage and the judge are those of the unchanged tree. If the text
that is to be changed is not there any more, that is an error here.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.mutants import change

ROOT = Path(__file__).parents[2]
COPIED = ("gspo_core", "services", "environments", "tests")
VOCABULARY = Path(".make") / "qwen-vocabulary"
NOTICED = "FAILED tests/play/test_play.py::test_random_episodes_are_stored_as_they_were_sampled"
MOST_S = 300


@dataclass(frozen=True)
class Mutant:
    file: str
    old: str
    new: str
    dialect: str = "chat"


MUTANTS = {
    "who asks again is sampled for again": Mutant(
        "services/gateway/agent/episode.py", "if ask.is_retry and equal:", "if False:"
    ),
    "an answer that nobody had is sampled anew": Mutant(
        "services/gateway/agent/episode.py", "return (entry.owed or is_lost) and not", "return False and not"
    ),
    "an equal request is given the answer that there is": Mutant(
        "services/gateway/agent/episode.py", "(entry for entry in equal if self._is_undelivered(entry))", "iter(equal)"
    ),
    "nobody has what was delivered": Mutant(
        "services/gateway/agent/live.py", "self._turn.entry.owed = True, False", "self._turn.entry.owed = False, False"
    ),
    "every turn reads its conversation anew": Mutant(
        "services/gateway/agent/plan.py", "if not isinstance(found, ForkReason):", "if False:"
    ),
    "a fork forgets what it forks from": Mutant(
        "services/episodes/tree.py", "[*after.branch.ids.head(after.end), *token_ids]", "[*token_ids]"
    ),
    "another sample forgets the conversation but its end": Mutant(
        "services/gateway/agent/plan.py",
        "return TurnPrompt(prompt, num_stored",
        "return TurnPrompt(prompt[-64:], num_stored",
    ),
    "what begins a call is no part of it": Mutant("services/episodes/tree.py", "if not self.num_begun:", "if True:"),
    "calls are given to who asked for none": Mutant(
        "services/gateway/agent/answers.py", 'gives_no_calls=ask.choice.mode == "none"', "gives_no_calls=False"
    ),
    "what is sampled behind a stop text is kept": Mutant(
        "services/gateway/agent/episode.py", "return head(sampled, ended[0] - len(tokens.sampled))", "return sampled"
    ),
    "a turn may be longer than was asked for": Mutant(
        "services/gateway/agent/budget.py",
        "asked = math.inf if turn.ask.max_tokens is None else",
        "asked = math.inf if True else",
    ),
    "a turn has the version of its last token": Mutant(
        "services/episodes/tree.py",
        "for span in sampled.spans:",
        "for span in (Span(one.start, one.end, sampled.spans[-1].version) for one in sampled.spans):",
    ),
    "the first token of an answer is no action": Mutant(
        "services/episodes/tree.py",
        "action_mask, behavior_logprobs = masked(len(token_ids), logprobs)",
        "action_mask, behavior_logprobs = masked(len(token_ids), logprobs[1:] or logprobs)",
    ),
    "other tools are another conversation": Mutant(
        "services/episodes/matching.py", "return Rewritten.TOOLS_CHANGED", "return Rewritten.SUB_AGENT"
    ),
    "every conversation is the agent's own": Mutant(
        "services/episodes/matching.py", "return Rewritten.SUB_AGENT", "return Rewritten.EDITED_HISTORY", "messages"
    ),
    "who asks again while a turn is sampled begins it once more": Mutant(
        "services/gateway/agent/episode.py", "return turn or self._alive(", "return self._alive(", "responses"
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.play.mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32), help="of the plays")
    parser.add_argument("names", nargs="*", help="left out: all")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    survived = 0
    for name in arguments.names or MUTANTS:
        began = time.monotonic()
        said = run(MUTANTS[name], arguments.seed)
        print(f"{'noticed' if said else 'SURVIVED'} after {time.monotonic() - began:.0f} s: {name}", flush=True)
        print(f"    {said}" if said else "", end="\n" if said else "", flush=True)
        survived += not said
    return int(survived > 0)


def run(mutant: Mutant, seed: int) -> str:
    """What was said against it; empty: nothing."""
    with tempfile.TemporaryDirectory(prefix="gspo-mutant-") as folder:
        tree = Path(folder) / "tree"
        for name in COPIED:
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(ROOT / VOCABULARY, tree / VOCABULARY)
        shutil.copy(ROOT / "pyproject.toml", tree)
        change(tree / mutant.file, mutant.old, mutant.new)
        return _play(tree, Path(folder), mutant.dialect, seed)


def _play(tree: Path, folder: Path, dialect: str, seed: int) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", f"{folder}/kept"]
    ended = subprocess.run(
        [*command, "tests/play/test_play.py", "-k", f"were_sampled and {dialect}", "--timeout", str(MOST_S)],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree), "GSPO_TEST_SEED": str(seed), "COLUMNS": "400"},
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode == 0:
        return ""
    said = [line for line in ended.stdout.splitlines() if line.startswith(NOTICED)]
    if ended.returncode != 1 or not said:
        raise RuntimeError(f"the play itself is broken:\n{ended.stdout}\n{ended.stderr}")
    return said[0].removeprefix(NOTICED)[:300]


if __name__ == "__main__":
    sys.exit(main())
