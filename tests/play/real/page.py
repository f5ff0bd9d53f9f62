"""What real plays found: ``benchmarks/results/harnesses.json``, a row for each harness and run, and its page.

Rule: rows are written by the run that found them, and by nobody else. A harness's episodes of several runs add up where
the runs are of this generation, which is raised when what is played or judged becomes something else.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tests.play.harnesses import HARNESSES
from tests.play.packages import PACKAGES
from tests.play.real.judged import Computed, Verdict
from tests.play.real.passage import Sample

ROOT = Path(__file__).parents[3]
KEPT = "benchmarks/results/harnesses.json"
PAGE = "benchmarks/results/harnesses.md"
WANTED = 200
MOST_CHARS = 300
"""Of a fault, on the page."""
GENERATION = 1
TWINS = (
    "the player counted a history that it edited behind one of two equal samples, and the gateway went on from the "
    "other one without a branch"
)
EMPTY = "the player took its own compaction to an answer without a word for a helper"
LOOP = (
    "the Gemini CLI saw a loop in what was answered, ended it, and put words of its own in its place; the judge knew "
    "nothing of that, and does now"
)
LEFT_OUT = (
    "mini-swe-agent leaves an answer that calls nothing out of its history and says what was wrong with it; the judge "
    "took the next request for one that goes on from that answer, and does no more"
)
EXPLAINED = {
    3643104806: f"The false branches are none: what was expected was wrong. Two: {TWINS}. One: {EMPTY}.",
    1515030957: "As many branches as the player counted, one of them for another reason. Why is not known: what the "
    "run left was not kept.",
    1906065520: f"The false branches are none: {LEFT_OUT}.",
    2047587010: f"The false branch is none: {LOOP}.",
}
"""Of a seed: what was found to be the cause of its faults."""
Row = dict[str, Any]


def row_of(name: str, version: str, verdicts: Sequence[Verdict], ends: Sequence[str], seconds: Sequence[float]) -> Row:
    """``ends``: of its episodes that ended otherwise than they should. ``seconds``: that each took."""

    def total(field: str) -> int:
        return sum(getattr(one, field) for one in verdicts)

    def counted(field: str) -> dict[str, int]:
        return dict(sorted(sum((getattr(one, field) for one in verdicts), Counter[str]()).items()))

    return {
        "harness": name,
        "version": version,
        "episodes": len(verdicts),
        "turns": total("turns"),
        "tokens": total("tokens"),
        "trained": total("trained"),
        "untrained_turns": total("untrained_turns"),
        "branches": counted("branches"),
        "refused": counted("refused"),
        "versions": max((one.versions for one in verdicts), default=0),
        "mixed": sum(one.versions > 1 for one in verdicts),
        "shortest": min((one.first_prompt for one in verdicts), default=0),
        "longest": max((one.longest_prompt for one in verdicts), default=0),
        "ended_otherwise": dict(Counter(shortened(one) for one in ends)),
        "engine_s": costs([sample for one in verdicts for sample in one.samples]),
        "seconds": round(sum(seconds) / len(seconds), 1) if seconds else 0.0,
        "without_report": sum(not one.has_report for one in verdicts),
        "false_branches": [fault for one in verdicts for fault in one.false_branches],
        "faults": [fault for one in verdicts for fault in one.faults],
    }


def costs(samples: Sequence[Sample]) -> dict[str, Any]:
    """Median seconds of the engine for a turn: where less than half of its prompt was cached, and elsewhere."""
    found: dict[str, Any] = {}
    for name, is_cold in (("cold", True), ("warm", False)):
        seconds = [one.seconds for one in samples if (2 * one.num_cached < one.num_prompt) == is_cold]
        found |= {name: round(median(seconds), 2), f"num_{name}": len(seconds)} if seconds else {}
    return found


def shortened(end: str, most: int = 120) -> str:
    """How an episode ended, in few words: its last line."""
    head, _, last = end.strip().partition(": ")
    return f"{head}: {last.strip().splitlines()[-1]}"[:most] if last.strip() else head[:most]


def kept(run: Mapping[str, Any], rows: Sequence[Row], root: Path = ROOT) -> None:
    """``run``: what the rows have in common. It takes the place of an earlier run of the same seed."""
    path = root / KEPT
    known: list[dict[str, Any]] = json.loads(path.read_text()) if path.is_file() else []
    runs = [*(one for one in known if one["seed"] != run["seed"]), {**run, "rows": list(rows)}]
    path.write_text(json.dumps(runs, indent=1, ensure_ascii=False) + "\n")
    (root / PAGE).write_text(page(runs))


def told(computed: Computed) -> dict[str, Any]:
    return dict(vars(computed))


HEAD = """# Unmodified harnesses play one job on the whole stack

Written by `make play-harnesses-real` (`python -m tests.play.real`). Redis, API, trainer, gateway and the embedded
engine are processes, as `gspo up` starts them. One job is submitted, whose agent is a service that starts a harness for
each episode, in turn; GSPO is trained all the while, so new weights arrive in the middle of episodes. The engine
samples every token from a model of Qwen3's shape with its vocabulary of 151,669 entries (two layers of width 64),
taught for some minutes to call the shell of the harness that it sits in, now and then a tool that there is not, and to
end. What harnesses ask and what the engine answers is read along on its way.

Of each trained episode is judged: every stored token, log-prob and version is what the engine answered behind exactly
the stored ids; each token's log-prob is what transformers computes from the published weights of its version; each
sampled token is trained in one branch; each turn read the marked texts that its request has; no branch begins where the
requests of a coding agent alone say that a conversation goes on; of agents that packages are for, the branches are
those that their player counts as it causes them, where it came to its end. A fault is where any of it does not hold.
"""
COLUMNS = (
    *("episodes", "turns", "sampled", "branches by reason", "refused by name", "false branches", "faults"),
    *("versions an episode, at most", "of several", "prompts", "s of the engine a turn", "s an episode"),
    *("ended otherwise",),
)
TOTAL = (
    "episodes",
    "turns",
    "sampled",
    "branches by reason",
    "refused by name",
    "false branches",
    "faults",
    "of several",
)
FOOT = """
`of several`: episodes with tokens of more than one version. `prompts`: tokens of the shortest that began an episode,
and of the longest. `s of the engine a turn`: median from request to answer, waits included; `cold` where less than half
of the prompt was in its cache, which new weights empty. `ended otherwise`: what harnesses made of what such a model
says; their episodes are trained and judged like the others.
"""


def page(runs: Sequence[Mapping[str, Any]]) -> str:
    return HEAD + _in_all(runs) + "".join(_part(one) for one in runs) + FOOT


def counted(runs: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row for each harness and version, with the sums of the runs that count: of trees that were committed."""
    found: dict[tuple[str, str], Row] = {}
    for run in runs:
        if run.get("generation") == GENERATION and "-" not in run["commit"]:
            for row in run["rows"]:
                known = found.get(key := (row["harness"], row["version"]))
                found[key] = row if known is None else known | {name: _sum(known[name], row[name]) for name in SUMMED}
    return _in_order(list(found.values()))


SUMMED = ("episodes", "turns", "tokens", "branches", "refused", "false_branches", "faults", "mixed")


def _sum(one: Any, other: Any) -> Any:
    return dict(sorted((Counter(one) + Counter(other)).items())) if isinstance(one, dict) else one + other


def _in_all(runs: Sequence[Mapping[str, Any]]) -> str:
    rows = counted(runs)
    if not rows:
        return ""
    few = [f"{row['harness']} {row['episodes']}" for row in rows if row["episodes"] < WANTED]
    lines = [
        "\n## In all\n",
        f"Of the runs below whose seed has a star: {sum(row['episodes'] for row in rows):,} episodes.\n",
        *_table(TOTAL, rows),
        f"\nFewer than {WANTED} episodes so far: {', '.join(few) or 'none'}.",
        "Not played: OpenHands' SDK, all of whose releases (1.0.0 to 1.58.2) need Python 3.12.",
    ]
    return "\n".join([*lines, ""])


def _table(columns: Sequence[str], rows: Sequence[Row]) -> list[str]:
    cells = [[by_column[name] for name in columns] for by_column in map(_cells, rows)]
    head = ["| harness | " + " | ".join(columns) + " |", "|---" * (1 + len(columns)) + "|"]
    return head + [f"| {row['version']} | {' | '.join(of_row)} |" for row, of_row in zip(rows, cells, strict=True)]


def _in_order(rows: Sequence[Row]) -> list[Row]:
    order = [*HARNESSES, *PACKAGES]
    return sorted(rows, key=lambda row: order.index(row["harness"]))


def _part(run: Mapping[str, Any]) -> str:
    checked, control = run["computed"], ""
    if checked["other_tokens"]:
        alike = f"{checked['other_equal']:,} of {checked['other_tokens']:,}"
        control = f" Under the weights of another version {alike} have theirs."
    star = "" if run.get("generation") != GENERATION or "-" in run["commit"] else " \\*"
    lines = [
        f"\n## Seed {run['seed']}{star}\n",
        f"Commit {run['commit']}, {run['date']}; {run['cores']} cores shared with other work, load {run['load'][0]} "
        f"before and {run['load'][1]} after; {run['steps']} steps in {run['seconds']:,} s, then {run['status']}. "
        f"{checked['equal']:,} of {checked['tokens']:,} sampled tokens, from {checked['versions']} versions, have the "
        f"recorded log-prob under their recorded weights (largest difference {checked['largest']:.1e}).{control}\n",
        *_table(COLUMNS, _in_order(run["rows"])),
        *_faults(run["rows"]),
        *(["", EXPLAINED[run["seed"]]] if run["seed"] in EXPLAINED else []),
    ]
    return "\n".join([*lines, ""])


def _faults(rows: Sequence[Row]) -> list[str]:
    found = [(row["harness"], text) for row in rows for text in (*row["faults"], *row["false_branches"])]
    return ["", *(f"- {name}: `{text[:MOST_CHARS]}`" for name, text in found)] if found else []


def _cells(row: Row) -> Mapping[str, str]:
    """By the column."""

    def counts(name: str) -> str:
        return ", ".join(f"{what} {number:,}" for what, number in row[name].items()).replace("|", "\\|") or "none"

    costs = [f"{name} {row['engine_s'][name]}" for name in ("cold", "warm") if name in row["engine_s"]]
    return {
        "episodes": f"{row['episodes']:,}",
        "turns": f"{row['turns']:,}",
        "sampled": f"{row['tokens']:,}",
        "branches by reason": counts("branches"),
        "refused by name": counts("refused"),
        "false branches": str(len(row["false_branches"])),
        "faults": str(len(row["faults"])),
        "versions an episode, at most": str(row["versions"]),
        "of several": str(row["mixed"]),
        "prompts": f"{row['shortest']:,} to {row['longest']:,}",
        "s of the engine a turn": ", ".join(costs) or "none",
        "s an episode": str(row["seconds"]),
        "ended otherwise": counts("ended_otherwise").replace("\n", " "),
    }
