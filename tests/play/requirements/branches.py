"""Requirement 4: why a branch began. The ways in which agents leave a conversation, over HTTP, in each dialect.

Of each is judged what the API shows of the episode: the reason, the turn that is gone on from, and how many tokens were
read again; the steps' own sum of these is compared with what the episodes come to.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from gspo_core.api_answers import EpisodeDetail
from tests.play.requirements.asking import DIALECTS, MESSAGES, Answered, Asker, Body, Function, Said, body
from tests.play.requirements.figures import Figure
from tests.play.requirements.place import Place, fetched
from tests.play.requirements.texts import sentence

EACH = 12
AT_ONCE = 4
GROUPS_PER_STEP = 4
MIN_QUOTED_CHARS = 24
"""Of an answer that is quoted: of fewer a text might say it by chance."""
RETRY = {"x-stainless-retry-count": "1"}
SUB_AGENT = "sub_agent"


@dataclass(frozen=True)
class Thread:
    """What an agent and its policy have said: two turns, behind which it may go on."""

    instructions: str
    texts: Sequence[str]
    """Of the user."""
    answers: Sequence[Answered]

    @property
    def said(self) -> list[Said]:
        first, second = (one.text for one in self.answers)
        told = [("user", self.texts[0]), ("assistant", first), ("user", self.texts[1]), ("assistant", second)]
        return [("system", self.instructions), *told]


@dataclass(frozen=True)
class Move:
    """A third request."""

    said: Sequence[Said]
    tools: tuple[Function, ...] = ()
    headers: Mapping[str, str] | None = None
    nonce: str = ""
    """Of the first block of instructions, in Anthropic's dialect."""


@dataclass(frozen=True)
class Situation:
    move: Callable[[Thread, random.Random], Move]
    reason: str = ""
    parent: int | None = None
    """The turn that it goes on from."""
    is_new: bool = True
    """Else the second turn is given again."""
    quotes: bool = False
    """What the second turn said; of a few characters nobody can tell that."""
    reads_all: bool = False
    """Also what its parent stands for: words of the policy stand behind it, and not where it said them."""
    dialects: Sequence[str] = DIALECTS


def _behind(thread: Thread, rng: random.Random, *more: Said) -> list[Said]:
    return [*thread.said, ("user", sentence(rng)), *more]


def _nonce(thread: Thread, rng: random.Random) -> Move:
    return Move(_behind(thread, rng), nonce=f"{rng.getrandbits(20):05x}")


def _edited(thread: Thread, rng: random.Random) -> Move:
    said = _behind(thread, rng)
    return Move([*said[:3], ("user", sentence(rng)), *said[4:]])


def _reminder_moved(thread: Thread, rng: random.Random) -> Move:
    said = _behind(thread, rng)
    return Move([said[0], ("user", said[1][1].partition("</reminder>")[2]), *said[2:]])


NONCE = "a nonce of a harness"
SITUATIONS: Mapping[str, Situation] = {
    "it goes on": Situation(lambda t, rng: Move(_behind(t, rng)), parent=1),
    "another sample of the same request": Situation(lambda t, rng: Move(t.said[:4]), "resampled", 0),
    "a retry": Situation(lambda t, rng: Move(t.said[:4], headers=RETRY), is_new=False),
    "it goes on from an earlier turn": Situation(
        lambda t, rng: Move([*t.said[:3], ("user", sentence(rng))]), "edited_history", 0
    ),
    "an old message is edited": Situation(_edited, "edited_history", 0, reads_all=True),
    "a reminder moved": Situation(_reminder_moved, "edited_history"),
    "a sub-agent with instructions of its own": Situation(
        lambda t, rng: Move([("system", sentence(rng)), ("user", sentence(rng))]), SUB_AGENT
    ),
    "a sub-agent with the same instructions": Situation(
        lambda t, rng: Move([t.said[0], ("user", sentence(rng))]), SUB_AGENT
    ),
    "a sub-agent that is handed what was said": Situation(
        lambda t, rng: Move([("system", sentence(rng)), ("user", f"Judge this: {t.answers[1].text}")]), SUB_AGENT
    ),
    "a summary in place of all": Situation(
        lambda t, rng: Move([t.said[0], ("user", f"{sentence(rng)} {t.answers[1].text} Go on.")]),
        "compacted",
        quotes=True,
    ),
    "a summary before the last messages": Situation(
        lambda t, rng: Move([t.said[0], ("user", sentence(rng)), *t.said[3:], ("user", sentence(rng))]), "compacted"
    ),
    "a tool more": Situation(
        lambda t, rng: Move(_behind(t, rng), tools=(Function(f"tool_{rng.getrandbits(24):x}", sentence(rng)),)),
        "tools_changed",
    ),
    "words put into the policy's mouth": Situation(
        lambda t, rng: Move(_behind(t, rng, ("assistant", sentence(rng)), ("user", sentence(rng)))),
        "assistant_message",
        1,
        reads_all=True,
    ),
    NONCE: Situation(_nonce, parent=1, dialects=(MESSAGES,)),
}


def asked(dialect: str, move: Move) -> Body:
    found = body(dialect, move.said, move.tools)
    if move.nonce:
        bill = f"x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch={move.nonce};"
        found["system"] = [{"type": "text", "text": bill}, *found["system"]]
    return found


@dataclass(frozen=True)
class Shared:
    """Tokens of a branch, as the API lists them."""

    ids: Sequence[int]
    num_before: int
    """Up to the first that was sampled."""


def read_again(branch: Shared, earlier: Sequence[Shared]) -> tuple[int, int]:
    """How many tokens an earlier branch has too, at its beginning; and how many were read anew."""
    shared = max((common(branch.ids, one.ids) for one in earlier), default=0)
    return shared, max(branch.num_before - shared, 0)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def in_branches(columns: Mapping[str, Sequence[Any]]) -> dict[int, Shared]:
    """By branch. ``columns``: the tokens of an episode, as the API has them."""
    found: dict[int, tuple[list[int], list[bool]]] = {}
    for token, branch, is_sampled in zip(columns["id"], columns["branch"], columns["sampled"], strict=True):
        ids, sampled = found.setdefault(branch, ([], []))
        ids.append(token)
        sampled.append(is_sampled)
    return {
        branch: Shared(ids, sampled.index(True) if True in sampled else len(ids))
        for branch, (ids, sampled) in found.items()
    }


@dataclass(frozen=True)
class Left:
    """What an episode leaves: the reason of each branch that has one, and the tokens that were read anew for them."""

    reasons: Sequence[str]
    num_anew: int


def left_by(detail: EpisodeDetail) -> Left:
    """What sub-agents read is new, and does not count."""
    by_branch, columns = dict[int, str](), detail["tokens"]
    for one in reversed(detail["turns"]):
        by_branch[one["branch"]] = one["reason"] or ""
    tokens = in_branches({} if columns is None else columns)
    numbers = sorted(tokens)
    anew = [
        read_again(tokens[number], [tokens[one] for one in numbers[:place]])[1]
        for place, number in enumerate(numbers)
        if by_branch[number] not in ("", SUB_AGENT)
    ]
    return Left([one for one in by_branch.values() if one], sum(anew))


def reason_due(situation: Situation, thread: Thread) -> str:
    is_short = situation.quotes and len(thread.answers[1].text) < MIN_QUOTED_CHARS
    return SUB_AGENT if is_short else situation.reason


def cached_due(situation: Situation, thread: Thread, answer: Answered) -> int:
    """Of the tokens of its prompt: those that were stored already, as its usage has to say."""
    if situation.reason == "resampled":
        return answer.prompt
    if situation.parent is None or situation.reads_all:
        return 0
    before = thread.answers[situation.parent]
    return before.prompt + before.sampled


def faults_of(situation: Situation, thread: Thread, answer: Answered, detail: EpisodeDetail) -> Iterator[str]:
    turns = {one["turn"]: one for one in detail["turns"]}
    if not situation.is_new:
        if answer.id != thread.answers[1].id or len(turns) != 2:
            yield f"the retry was given another turn of {len(turns)}"
        return
    if answer.turn not in turns or len(turns) != 3:
        yield f"the API shows {len(turns)} turns for 3"
        return
    shown, due = turns[answer.turn], reason_due(situation, thread)
    if (shown["reason"] or "") != due:
        yield f"the reason is {shown['reason']}, and {due or 'none'} was due"
    if shown["parent"] != situation.parent:
        yield f"the parent is {shown['parent']}, and {situation.parent} was due"
    if answer.cached != (cached := cached_due(situation, thread, answer)):
        yield f"{answer.cached} tokens of the prompt count as stored, and {cached} were due"
    tokens = in_branches(detail["tokens"])  # type: ignore[arg-type]
    earlier = [one for number, one in tokens.items() if number < shown["branch"]]
    shared = read_again(tokens[shown["branch"]], earlier)[0] if due else 0
    if shown["shared_tokens"] != shared:
        yield f"{shown['shared_tokens']} tokens count as shared, and {shared} are"
    if due and tokens[shown["branch"]].num_before != answer.prompt:
        yield f"the branch reads {tokens[shown['branch']].num_before} tokens, and its usage says {answer.prompt}"
    if not due and shown["branch"] != turns[1]["branch"]:
        yield "it goes on, and stands in another branch"


def branches(place: Place) -> Figure:
    figure = Figure(
        4,
        "branches",
        f"{len(SITUATIONS)} ways to leave a conversation of two turns, or not to, with drawn texts, tools and dialects "
        "(a nonce in Anthropic's alone); each in an episode of its own, read with `GET /v1/episodes`",
    )
    rng = random.Random(f"{place.seed} branches")
    names = [name for name in SITUATIONS for _ in range(EACH)]
    rng.shuffle(names)
    with (
        place.job("branches", [fetched("branches")], groups_per_step=GROUPS_PER_STEP) as job,
        httpx.Client(trust_env=False) as http,
        ThreadPoolExecutor(AT_ONCE) as threads,
    ):
        player = _Player(figure, place, http, job)
        left = dict(threads.map(player.play, names, [rng.getrandbits(48) for _ in names]))
        num_steps = len(names) // (2 * GROUPS_PER_STEP)
        place.until(lambda: len(place.client.metrics(job)) >= num_steps, "all that was played is trained")
        _compare_steps(figure, place, job, left)
    figure.held = (
        f"reason, parent, and tokens read again of {figure.told('shown as it was')} of {len(names)} are "
        "what the player did, and so are the sums of the steps (`branches/*`)"
    )
    return figure


def _compare_steps(figure: Figure, place: Place, job: str, left: Mapping[str, Left]) -> None:
    trained = [left[one["id"]] for one in place.client.episodes(job) if one["id"] in left]
    due = Counter(f"branches/{reason}" for one in trained for reason in one.reasons)
    due["branches/tokens_read_anew"] = sum(one.num_anew for one in trained)
    told = Counter[str]()
    for row in place.client.metrics(job):
        told.update({name: int(value) for name, value in row.items() if name.startswith("branches/")})
    figure.count("episodes that were trained", len(trained))
    figure.count("tokens read anew", due["branches/tokens_read_anew"])
    for name in sorted(told.keys() | due.keys()):
        figure.expect(told[name] == due[name], f"{name} of the steps is {told[name]}, and {due[name]} was due")


@dataclass(frozen=True)
class _Player:
    figure: Figure
    place: Place
    http: httpx.Client
    job: str

    def play(self, name: str, seed: int) -> tuple[str, Left]:
        rng, situation, figure = random.Random(seed), SITUATIONS[name], self.figure
        dialect = rng.choice(list(situation.dialects))
        lease = self.place.lease(self.job)
        asker = Asker(self.http, lease["base_url"], lease["api_key"])
        thread = _thread(asker, dialect, rng, nonce="a1" if name == NONCE else "")
        move = situation.move(thread, rng)
        answer = asker.ask(dialect, asked(dialect, move), move.headers)
        detail = self.place.client.episode(lease["episode"], tokens=True)
        faults = [*faults_of(situation, thread, answer, detail)] if answer.is_answer else [answer.fault]
        for fault in faults:
            figure.expect(False, f"{name}, in {dialect}: {fault}")
        figure.count("episodes")
        figure.count(f"in {dialect}")
        figure.count("shown as it was", not faults)
        figure.count_part(name, "not as it was" if faults else "as it was")
        self.place.client.finish_lease(lease, round(rng.random(), 3))
        return lease["episode"], left_by(detail)


def _thread(asker: Asker, dialect: str, rng: random.Random, nonce: str) -> Thread:
    instructions, texts = sentence(rng), [f"<reminder>{sentence(rng)}</reminder>{sentence(rng)}", sentence(rng)]
    said: list[Said] = [("system", instructions)]
    answers = list[Answered]()
    for text in texts:
        said.append(("user", text))
        answers.append(asker.ask(dialect, asked(dialect, Move(said, nonce=nonce))))
        if not answers[-1].is_answer:
            raise RuntimeError(f"a plain request was refused: {answers[-1].fault}")
        said.append(("assistant", answers[-1].text))
    return Thread(instructions, texts, answers)
