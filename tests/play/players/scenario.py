"""What players share: the plan of an episode, what they do by hand, and how they are told of their episodes.

Rule: only the standard library, since it also runs under Pythons that have one package and nothing of ours.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import traceback
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

# As everywhere in the tests. This file runs where the package is that it plays, and the project is not.
HANG_S = 600.0

Wire = dict[str, Any]

WORDS = (
    "one",
    "two",
    "three",
    "Größe",
    "数",
    "🦊",
    "naïve",
    "the",
    "end",
    "and",
    "{}",
    "[1]",
    "\\n",
    "'",
    '"',
    "&amp;",
)
SPELLED = (
    "<|im_end|>",
    "<|endoftext|>",
    "<tool_call>",
    "</tool_call>",
    "</tool_response>",
    "<|im_start|>system\n",
    "<think>",
)
# Each is one token, wherever it stands.
FILLING = (" the", " time", " people", " water", " and", " of", " world", " house", " day", " work", " one")
# Ends the code that a policy writes.
CODE_ENDS = "</code>"
MISHAPS = ("unavailable", "broken", "lost")
LOOKUP: Wire = {
    "name": "lookup",
    "description": "Looks something up.",
    "parameters": {
        "type": "object",
        "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}},
        "required": ["query"],
    },
}
NOTE: Wire = {
    "name": "note",
    "description": "Writes a note.",
    "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
}


@dataclass(frozen=True)
class Call:
    """An episode to play."""

    task: Wire
    base_url: str
    """It ends in /v1."""
    api_key: str
    model: str = "policy"

    @property
    def least_turns(self) -> int:
        return int(self.task["turns"])

    def instructions(self, rng: random.Random, begin: str) -> str:
        """What the agent is told first, as long as the task says."""
        return words(rng, begin) + "".join(rng.choices(FILLING, k=self.task.get("prompt_tokens", 0)))

    def direct(self, *, mishap: str = "", cues: Sequence[str] = ()) -> None:
        """What goes wrong with the next request, and what the policy says next."""
        body = json.dumps({"mishap": mishap, "cues": list(cues)}).encode()
        url = self.base_url.removesuffix("/v1") + "/play"
        headers = {"authorization": f"Bearer {self.api_key}", "content-type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=HANG_S) as answer:
            answer.read()

    @property
    def rng(self) -> random.Random:
        return random.Random(self.task["seed"])

    @property
    def features(self) -> list[str]:
        return list(self.task["features"])


@dataclass
class Report:
    """What a player did, as it knows it."""

    turns: int = 0
    branches: Counter[str] = field(default_factory=Counter)
    retries: int = 0
    parallel: int = 0
    stops: bool = False
    extended: int = 0
    """Answers that were sent back with more than was told, and gone on from."""
    num_awaited: int = 0
    """Calls of the next turn, where the policy was told how many."""
    calls_lost: int = 0
    """Those that were spoken and did not arrive."""

    def heard(self, num_calls: int) -> None:
        self.turns += 1
        self.parallel += num_calls > 1
        if self.num_awaited:
            self.calls_lost += abs(self.num_awaited - num_calls)
            self.num_awaited = 0

    def as_json(self) -> Wire:
        return {**vars(self), "branches": dict(self.branches)}


MARK = "#[0-9a-f]{12}"
"""Of every text that an agent writes; no policy says one."""


def words(rng: random.Random, begin: str = "") -> str:
    """Never the same twice, often with the spelling of an added token in it."""
    said = " ".join(rng.choices((*WORDS, *SPELLED), k=rng.randint(0, 8)))
    return f"{begin}#{rng.getrandbits(48):012x} {said}"


def speak_calls(call: Call, report: Report) -> None:
    """The next turn has several calls, all of which arrive."""
    call.direct(cues=["calls:3"])
    report.num_awaited = 3


def shuffled(rng: random.Random, things: Sequence[str]) -> list[str]:
    return rng.sample(list(things), len(things))


@dataclass
class Said:
    text: str
    calls: list[tuple[str, str]]
    """Id and name of each."""


class Seen:
    """The requests of an episode as their client sees them: why each begins a branch, if it does.

    For clients that send texts only: a call that was answered is never sent back as one."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self._turns: list[Wire] = []

    def note(
        self, tools: Any, messages: Sequence[tuple[str, str]], answer: str, num_calls: int, stop: str | None = None
    ) -> None:
        """``stop``: the stop text that ended the answer; None where it was not ended by one."""
        asked = list(messages)
        reason = self._reason(tools, asked)
        if reason:
            self.report.branches[reason] += 1
        turn: Wire = {
            "tools": tools,
            "asked": asked,
            "answer": None if num_calls else answer.strip(),
            "stop": stop,
            "continued": False,
        }
        self._turns.append(turn)
        self.report.heard(num_calls)

    def _reason(self, tools: Any, asked: list[tuple[str, str]]) -> str:
        if not self._turns:
            return ""
        alike = [turn for turn in self._turns if turn["tools"] == tools]
        if any(turn["asked"] == asked for turn in alike):
            return "resampled"
        nodes = [turn for turn in alike if self._goes_on(turn, asked)]
        if nodes:
            node = max(nodes, key=lambda turn: len(turn["asked"]))
            was, node["continued"] = node["continued"], True
            (role, text), *later = asked[len(node["asked"]) :]
            is_own_end = role == "assistant" and all(role != "assistant" for role, _ in later)
            if is_own_end and text.strip() != node["answer"]:
                self.report.extended += 1
            return "edited_history" if was else ""
        begins = [turn["asked"] == asked[: len(turn["asked"])] for turn in self._turns]
        if not any(begins[number] for number, turn in enumerate(self._turns) if turn in alike) and any(begins):
            return "tools_changed"
        return self._why_new(asked)

    def _why_new(self, asked: list[tuple[str, str]]) -> str:
        ends = [(turn, len(asked)) for turn in self._turns if asked[2:] and turn["asked"][-1] == asked[-1]]
        said = [place for place in range(2, len(asked)) if asked[place][0] == "assistant"]
        for place in said[-1:]:
            ends += [(turn, place) for turn in self._turns if turn["answer"] == asked[place][1]]
        if ends:
            return "compacted" if any(before < len(turn["asked"]) for turn, before in ends) else "edited_history"
        return "edited_history" if any(turn["asked"][:2] == asked[:2] for turn in self._turns) else "sub_agent"

    def _goes_on(self, turn: Wire, asked: list[tuple[str, str]]) -> bool:
        before, answer = turn["asked"], turn["answer"]
        if answer is None or len(asked) <= len(before) or asked[: len(before)] != before:
            return False
        role, text = asked[len(before)]
        if role != "assistant":
            return not answer
        return text.strip() == answer or (turn["stop"] is not None and text.startswith(answer or turn["stop"]))


class Conversation(Protocol):
    """One in the way of some package or dialect."""

    has_stop: bool
    other_tools: bool

    def user(self, text: str) -> None: ...

    def results(self, results: Sequence[tuple[str, str]]) -> None:
        """Id and text of each; they come right behind the answer that asked for them."""
        ...

    def ask(self, *, stream: bool, choice: str, max_tokens: int | None, stop: Sequence[str]) -> Said:
        """The answer is added. ``choice``: auto, none, required, or the name of a tool."""
        ...

    def copy(self) -> Conversation: ...

    def write_back(self, words: str) -> None:
        """Behind the last answer."""
        ...

    def compacted(self, summary: str) -> Conversation:
        """The system message, ``summary`` as the user's, and the last answer."""
        ...


Open = Callable[[str], Conversation]
"""Begins a conversation with this system message."""


class ByHand:
    """One episode of an agent that keeps its conversations itself."""

    def __init__(self, call: Call, begin: Open) -> None:
        self.call = call
        self.begin = begin
        self.rng = call.rng
        self.report = Report()

    def play(self) -> Report:
        rng = self.rng
        chat = self.begin(self.call.instructions(rng, "You are careful. "))
        chat.user(words(rng))
        num_turns = rng.randint(self.call.least_turns, self.call.least_turns + 3)
        at = [(rng.randint(1, num_turns - 1), feature) for feature in self.call.features]
        for step in range(num_turns):
            self.reply(chat, self.ask(chat))
            for _, feature in (one for one in at if one[0] == step):
                chat = getattr(self, f"do_{feature}")(chat)
        return self.report

    def ask(self, chat: Conversation, **how: Any) -> Said:
        rng = self.rng
        choice = rng.choices(("auto", "none", "required", "lookup", "note"), (14, 1, 3, 1, 1))[0]
        if choice in ("lookup", "note") and chat.other_tools:
            choice = "required"
        max_tokens = rng.randint(3, 20) if rng.random() < 0.1 else None
        stop = [rng.choice(("the", " and", "數", "{"))] if chat.has_stop and rng.random() < 0.08 else []
        self.report.stops |= bool(stop)
        said = chat.ask(
            **({"stream": rng.random() < 0.5, "choice": choice, "max_tokens": max_tokens, "stop": stop} | how)
        )
        self.report.heard(len(said.calls))
        asked = how.get("choice", choice)
        if said.calls and (asked == "none" or (asked in ("lookup", "note") and said.calls[0][1] != asked)):
            raise AssertionError(f"{said.calls} were answered, and {asked} was asked for")
        return said

    def reply(self, chat: Conversation, said: Said) -> None:
        rng = self.rng
        if said.calls:
            results = [(call_id, words(rng, "Found: ")) for call_id, _ in said.calls]
            rng.shuffle(results)
            chat.results(results)
        if not said.calls or rng.random() < 0.2:
            chat.user(words(rng))

    def do_parallel(self, chat: Conversation) -> Conversation:
        for choice in ("auto", "required"):
            speak_calls(self.call, self.report)
            self.reply(chat, self.ask(chat, choice=choice, max_tokens=None, stop=[]))
        return chat

    def do_retry(self, chat: Conversation) -> Conversation:
        for mishap in shuffled(self.rng, (*MISHAPS, "torn")):
            self.call.direct(mishap=mishap)
            self.report.retries += 1
            how: Wire = {"stream": True, "choice": "auto", "max_tokens": None, "stop": []} if mishap == "torn" else {}
            try:
                said = self.ask(chat, **how)
            except Exception:
                if mishap != "torn":  # packages leave it to their users to ask again
                    raise
                said = self.ask(chat, **how)
            self.reply(chat, said)
        return chat

    def do_edited(self, chat: Conversation) -> Conversation:
        said = self.ask(chat)
        before = chat.copy()
        self.reply(chat, said)
        self.reply(chat, self.ask(chat))
        self.reply(before, said)
        self.report.branches["edited_history"] += 1
        self.reply(before, self.ask(before))
        return self.rng.choice((chat, before))

    def do_sub_agent(self, chat: Conversation) -> Conversation:
        system = words(self.rng, "You help. ")
        for _ in range(self.rng.randint(1, 2)):  # the same one again is another conversation
            helper = self.begin(system)
            helper.user(words(self.rng))
            self.report.branches["sub_agent"] += 1
            for _ in range(self.rng.randint(1, 3)):
                self.reply(helper, self.ask(helper))
        return chat

    def do_best_of(self, chat: Conversation) -> Conversation:
        how = {"choice": "auto", "max_tokens": None, "stop": [], "stream": self.rng.random() < 0.5}
        other = chat.copy()
        self.reply(chat, self.ask(chat, **how))
        self.report.branches["resampled"] += 1
        self.reply(other, self.ask(other, **how))
        return self.rng.choice((chat, other))

    def do_written_back(self, chat: Conversation) -> Conversation:
        """As agents do that write code: the text that stops them is a part of it. Without stop texts, words are put
        behind an answer that was cut off."""
        for more in ("", words(self.rng, "\nCalling tools: ")):
            self.call.direct(cues=["code:"])
            how: Wire = {"stop": [CODE_ENDS], "max_tokens": None} if chat.has_stop else {"stop": [], "max_tokens": 4}
            self.report.stops |= chat.has_stop
            self.ask(chat, choice="auto", **how)
            chat.write_back((CODE_ENDS if chat.has_stop else "") + (more or words(self.rng)))
            self.report.extended += 1
            chat.user(words(self.rng, "Observation: "))
        self.reply(chat, self.ask(chat))
        return chat

    def do_compacted(self, chat: Conversation) -> Conversation:
        said = self.ask(chat)
        short = chat.compacted(words(self.rng, "In short: "))
        self.reply(short, said)
        self.report.branches["compacted"] += 1
        self.reply(short, self.ask(short))
        return short

    def do_other_tools(self, chat: Conversation) -> Conversation:
        chat.other_tools = True
        self.report.branches["tools_changed"] += 1
        self.reply(chat, self.ask(chat))
        return chat


def serve(play: Callable[[Call], Report], at_once: int) -> None:
    """Plays what comes as lines of JSON, so many side by side, and writes a line for each."""
    writing = threading.Lock()

    def one(line: str) -> None:
        given = json.loads(line)
        try:
            told: Wire = {"report": play(Call(given["task"], given["base_url"], given["api_key"])).as_json()}
        except BaseException as error:
            told = {"error": f"{type(error).__name__}: {error}"[:2000], "trace": traceback.format_exc()[-500:]}
        with writing:
            print(json.dumps({"id": given["id"], **told}), file=out, flush=True)

    out, sys.stdout = sys.stdout, sys.stderr  # packages write what they like
    with ThreadPoolExecutor(at_once) as pool:
        for line in sys.stdin:
            pool.submit(one, line)
