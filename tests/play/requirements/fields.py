"""Requirement 3: every field is acted on, said, or refused by name, under ``unsupported: refuse`` and ``say``.

Each field of the gateway's table is sent in a whole request of its dialect. One that is acted on is also left out: then
the request is refused, or the policy is shown another prompt, or the answer differs in a way that is looked for.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx

from gspo_core.api_answers import EpisodeLease
from tests.play.requirements.asking import CHAT, DIALECTS, GEMINI, MESSAGES, RESPONSES, Answered, Asker, Body, Function
from tests.play.requirements.asking import body as plain
from tests.play.requirements.field_cases import ACTED, Case, cases, judged
from tests.play.requirements.figures import Figure
from tests.play.requirements.place import Place, fetched
from tests.play.requirements.speaker import WORDS
from tests.play.requirements.texts import sentence

MODES = ("refuse", "say")
AT_ONCE = 3
REPEATS = 4
LIMITS: Mapping[str, tuple[str, ...]] = {
    CHAT: ("max_tokens", "max_completion_tokens"),
    RESPONSES: ("max_output_tokens",),
    MESSAGES: ("max_tokens",),
    GEMINI: ("generationConfig.maxOutputTokens",),
}
STOPS: Mapping[str, str] = {
    CHAT: "stop",
    MESSAGES: "stop_sequences",
    GEMINI: "generationConfig.stopSequences",
}
SEEDS = {CHAT: "seed", RESPONSES: "seed", MESSAGES: "seed", GEMINI: "generationConfig.seed"}


def fields(place: Place) -> Figure:
    figure = Figure(
        3,
        "every field is acted on, said, or refused by name",
        "each field of the gateway's table, in each dialect, with drawn values (those that ask for nothing too), and "
        "an unknown field in each object, under `unsupported: refuse` and `say`; what is acted on is left out as well",
    )
    rng = random.Random(f"{place.seed} fields")
    entries = [fetched(mode, unsupported=mode) for mode in MODES]
    with (
        place.job("fields", entries) as job,
        httpx.Client(trust_env=False) as http,
        ThreadPoolExecutor(AT_ONCE) as threads,
    ):
        for mode, lease in _leases(place, job).items():
            player = _Player(figure, mode, Asker(http, lease["base_url"], lease["api_key"]))
            for dialect in DIALECTS:
                given = [*cases(dialect, rng)]
                [*threads.map(player.play, given)]
            if mode == MODES[0]:
                for dialect in DIALECTS:
                    for wrong in seen_in_answers(player.asker, dialect, rng, figure):
                        figure.expect(False, f"{dialect}: {wrong}")
            place.client.release_lease(lease)
    told = figure.told
    figure.held = (
        f"of {told('requests')} requests {told('something else')} had another end than these "
        f"three, and {told('passed over')} fields that are not acted on were passed over unsaid"
    )
    return figure


def _leases(place: Place, job: str) -> dict[str, EpisodeLease]:
    """One by each mode."""
    found, others = dict[str, EpisodeLease](), list[EpisodeLease]()
    while len(found) < len(MODES):
        lease = place.lease(job, lease_s=3600.0)
        task = lease["task"]
        assert isinstance(task, dict)
        mode = str(task["what"])
        if mode in found:
            others.append(lease)
        else:
            found[mode] = lease
    for lease in others:
        place.client.finish_lease(lease, 0.5)
    return found


@dataclass(frozen=True)
class _Player:
    figure: Figure
    mode: str
    asker: Asker

    def play(self, case: Case) -> None:
        answer = self.asker.ask(case.dialect, case.asked)
        what, wrong = judged(case, answer)
        self.figure.count("requests")
        self.figure.count_part(f"{case.dialect}, `{self.mode}`", what)
        if what in ("something else", "passed over"):
            self.figure.count(what)
        if wrong:
            self.figure.expect(False, f"{case.dialect}, {self.mode}: {case.path} ({case.kind}): {wrong}")
        if case.kind == ACTED and self.mode == MODES[0] and answer.is_answer:
            self._left_out(case, answer)

    def _left_out(self, case: Case, answer: Answered) -> None:
        assert case.without is not None
        other = self.asker.ask(case.dialect, case.without)
        self.figure.count("left out")
        if 400 <= other.status < 500:
            self.figure.count("refused without it")
        elif other.prompt != answer.prompt:
            self.figure.count("shown to the policy")
        elif self.figure.expect(other.is_answer, f"{case.dialect}: without {case.path}: {other.status} {other.fault}"):
            self.figure.count("not seen in the prompt")


def put(given: Body, path: str, value: object) -> Body:
    """The body with a field at a dotted path."""
    name, _, rest = path.partition(".")
    return {**given, name: put(given.get(name, {}), rest, value) if rest else value}


def seen_in_answers(asker: Asker, dialect: str, rng: random.Random, figure: Figure) -> Iterator[str]:
    """Fields whose effect is no other prompt."""
    for _ in range(REPEATS):
        given = plain(dialect, [("user", sentence(rng))], most=48)
        for path in LIMITS[dialect]:
            most = rng.randint(1, 3)
            bare = {name: value for name, value in given.items() if name not in LIMITS[dialect]}
            answer = asker.ask(dialect, put(bare, path, most))
            figure.count("limits of an answer")
            if not 1 <= answer.sampled <= most:
                yield f"{path} {most}: {answer.sampled} tokens were sampled {answer.fault}"
        if dialect in STOPS:
            stops = [one.strip() for one in rng.sample(WORDS, 16)]
            answer = asker.ask(dialect, put(given, STOPS[dialect], stops))
            figure.count("stop texts")
            if not answer.is_answer or any(one in answer.text for one in stops):
                yield f"{STOPS[dialect]}: {answer.text} {answer.fault} holds one of {stops}"
        yield from _seeded(asker, dialect, rng, given, figure)
        yield from _streams(asker, dialect, given, figure)
        yield from _named(asker, dialect, given, figure)
        yield from _forced(asker, dialect, rng, figure)


def _seeded(asker: Asker, dialect: str, rng: random.Random, given: Body, figure: Figure) -> Iterator[str]:
    """The same seed behind the same ids says the same, as two samples of one request."""
    asked = put(given, SEEDS[dialect], rng.getrandbits(62))
    first, second = asker.ask(dialect, asked), asker.ask(dialect, asked)
    figure.count("seeds")
    if first.text != second.text or not first.is_answer:
        yield f"{SEEDS[dialect]}: {first.text!r} and {second.text!r} {first.fault}"
    elif first.id == second.id:
        yield f"{SEEDS[dialect]}: the same turn was given again"


def _streams(asker: Asker, dialect: str, given: Body, figure: Figure) -> Iterator[str]:
    asked = given | ({"stream_options": {"include_usage": True}} if dialect == CHAT else {})
    answer, told = asker.streamed(dialect, asked)
    figure.count("streams")
    if "text/event-stream" not in answer.headers["content-type"] or not told:
        yield f"stream: {answer.status_code} {answer.text}"
    elif dialect == CHAT and not any(one.get("usage") for one in told):
        yield "stream_options.include_usage: no usage was told"


def _named(asker: Asker, dialect: str, given: Body, figure: Figure) -> Iterator[str]:
    if dialect == GEMINI:
        return
    answer = asker.ask(dialect, given | {"model": "gpt-of-nobody"})
    figure.count("models of another name")
    if "model" not in answer.ignored or not answer.is_answer:
        yield f"model: another name is not said {answer.ignored} {answer.fault}"


FORCED: Mapping[str, Sequence[tuple[str, Body]]] = {
    CHAT: [
        ("tool_choice", {"tool_choice": {"type": "function", "function": {"name": "first"}}}),
        ("parallel_tool_calls", {"tool_choice": "required", "parallel_tool_calls": False}),
        ("tool_choice none", {"tool_choice": "none"}),
    ],
    RESPONSES: [
        ("tool_choice", {"tool_choice": {"type": "function", "name": "first"}}),
        ("parallel_tool_calls", {"tool_choice": "required", "parallel_tool_calls": False}),
        ("tool_choice none", {"tool_choice": "none"}),
    ],
    MESSAGES: [
        ("tool_choice", {"tool_choice": {"type": "tool", "name": "first"}}),
        ("tool_choice any", {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}),
        ("tool_choice none", {"tool_choice": {"type": "none"}}),
    ],
    GEMINI: [
        ("mode", {"toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["first"]}}}),
        ("mode any", {"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}}),
        ("mode none", {"toolConfig": {"functionCallingConfig": {"mode": "NONE"}}}),
    ],
}


def _forced(asker: Asker, dialect: str, rng: random.Random, figure: Figure) -> Iterator[str]:
    """A named tool is called; where any is to be called the answer begins as a call does, which this policy does not
    end as one."""
    tools = [Function("first", sentence(rng)), Function("second", sentence(rng))]
    for what, more in FORCED[dialect]:
        answer = asker.ask(dialect, plain(dialect, [("user", sentence(rng))], tools) | more)
        figure.count("choices of tools")
        if "none" in what:
            is_it = answer.is_answer and not answer.calls
        elif "any" in what or what.startswith("parallel"):
            is_it = bool(answer.calls) or "<tool_call>" in answer.text
        else:
            is_it = answer.calls == ("first",)
        if not is_it:
            yield f"{what}: {answer.calls} {answer.text!r} {answer.fault}"
