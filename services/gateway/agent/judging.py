"""Asks a job's judge for the reward of an episode whose agent has ended without one.

Rule: a judge that is away, overloaded, or answers without a score is asked again for a while; then the attempt has
failed, with the phase ``judge``. It is never a reward of 0. The judge reads the text of the tokens that were recorded,
and nothing that it says is a token of the episode. Its API key is the operator's: a job holds the name of a key and
chooses the URL, so a key that went to any URL would be anybody's. It is sent to the host that the operator wrote beside
it, and to nothing else; it is in no record and no message.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from pydantic import BaseModel, SecretStr, ValidationError

from gspo_core.chat import ChatCodec
from gspo_core.environment_contract import NO_REWARD, EnvironmentFailed, Llm, Start
from gspo_core.evidence import JUDGE, gathered
from gspo_core.json_value import JSON
from gspo_core.judge_spec import JudgeSpec, NoScore
from gspo_core.outbound import AddressRefused
from gspo_core.placeholders import NoSuchField
from gspo_core.told_messages import ShownMessage, messages_in
from gspo_core.types import NOTHING, Evidence
from services.episodes.metering import Counters
from services.episodes.reading import read
from services.gateway.agent.outbound_http import AWAY, AnswerTooLong, OutboundAnswer, OutboundHttp
from services.gateway.agent.played import PlayedSession
from services.state.retry import Backoff
from services.workers.setting import EpisodeSetting

PAUSES = Backoff(first_s=1.0, max_s=30.0)
# What a service asks for with ``Retry-After`` is obeyed up to it.
MAX_PAUSE_S = 60.0
MAX_BODY_BYTES = 1 << 20
# The longest prompt. A longer conversation loses its middle.
MAX_CONVERSATION_CHARS = 1 << 19
MAX_SHOWN_CHARS = 300
_OVERLOADED = frozenset({408, 409, 425, 429})
_PORTS = {"https": 443, "http": 80}


class NoKey(ValueError):
    """The text says what to change."""


@dataclass(frozen=True, slots=True)
class _Key:
    host: str
    secret: SecretStr


class JudgeKeys:
    """The operator's keys. ``texts``: ``NAME@HOST[:PORT]=KEY`` each, as the setting has them."""

    def __init__(self, texts: Iterable[SecretStr] = ()) -> None:
        self._keys: Mapping[str, _Key] = dict(map(_named_key, texts))

    def headers(self, name: str | None, url: str) -> dict[str, str]:
        """What proves to ``url`` who asks. Raises ``NoKey``."""
        if name is None:
            return {}
        key = self._keys.get(name)
        if key is None:
            raise NoKey(f"agent.judge.key: the gateway has no key {name} (GSPO_JUDGE_KEYS)")
        if key.host not in _names_of(url):
            raise NoKey(f"agent.judge.key: {name} is for {key.host}, and not for {max(_names_of(url), key=len)}")
        return {"Authorization": f"Bearer {key.secret.get_secret_value()}"}


def _named_key(text: SecretStr) -> tuple[str, _Key]:
    place, _, secret = text.get_secret_value().partition("=")
    name, _, host = place.partition("@")
    return name, _Key(host.lower(), SecretStr(secret))


def _names_of(url: str) -> set[str]:
    """How the host of a URL may be written: with its port, and without where it is that of the scheme."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    host = f"[{host}]" if ":" in host else host
    port = parts.port or _PORTS.get(parts.scheme, 0)
    return {f"{host}:{port}"} | ({host} if port == _PORTS.get(parts.scheme) else set())


class _Again(Exception):
    """Asking again may help. The text says what was wrong."""

    def __init__(self, why: str, pause_s: float | None = None) -> None:
        super().__init__(why)
        self.pause_s = pause_s


class _Message(BaseModel):
    content: str | None = None


class _Choice(BaseModel):
    message: _Message


class _Usage(BaseModel):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Completion(BaseModel):
    """The part of a chat completion that is read."""

    choices: list[_Choice]
    usage: _Usage | None = None


@dataclass(frozen=True, slots=True)
class JudgeVerdict:
    score: float
    metrics: Mapping[str, float]
    said: str = ""
    """The answer from which the score was read."""


@dataclass(frozen=True, slots=True)
class Judges:
    """All judges that jobs name. ``pause`` waits."""

    http: OutboundHttp
    keys: JudgeKeys
    rng: random.Random
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep
    clock: Callable[[], float] = time.monotonic

    async def verdict(self, spec: JudgeSpec, prompt: str, name: str, counters: Counters) -> JudgeVerdict:
        """``name``: the same for each repetition. Raises ``EnvironmentFailed``."""
        try:
            headers = self.keys.headers(spec.key, spec.url) | {
                "Content-Type": "application/json",
                "Idempotency-Key": name,
            }
        except NoKey as error:
            raise EnvironmentFailed("judge", str(error)) from None
        began = self.clock()
        for number in range(spec.retries + 1):
            counters.add("judge/asked")
            try:
                score, usage, said = await self._asked(spec, _body(spec, prompt), headers)
            except _Again as error:
                why, pause_s = str(error), error.pause_s
            else:
                return JudgeVerdict(score, {"judge_s": round(self.clock() - began, 3)} | usage, said)
            if number < spec.retries:
                counters.add("judge/asked_again")
                await self.pause(max(PAUSES.wait_s(number, self.rng.random()), min(pause_s or 0.0, MAX_PAUSE_S)))
        raise EnvironmentFailed("judge", f"{spec.model} was asked {spec.retries + 1} times: {why}")

    async def _asked(
        self, spec: JudgeSpec, body: bytes, headers: Mapping[str, str]
    ) -> tuple[float, dict[str, float], str]:
        url = f"{spec.url.rstrip('/')}/chat/completions"
        try:
            answer = await self.http.post(url, body, headers, timeout_s=spec.timeout_s, most_bytes=MAX_BODY_BYTES)
        except AWAY as error:
            raise _Again(f"{type(error).__name__}: {error}".rstrip(": ")) from error
        except AnswerTooLong as error:
            raise _Again(str(error)) from None
        except AddressRefused as error:
            raise EnvironmentFailed("judge", f"{error} (GSPO_OUTBOUND_NETWORKS)") from None
        return _read(spec, answer)


def _body(spec: JudgeSpec, prompt: str) -> bytes:
    messages: JSON = [{"role": "user", "content": prompt}]
    return json.dumps({**spec.request, "model": spec.model, "messages": messages}).encode()


def _read(spec: JudgeSpec, answer: OutboundAnswer) -> tuple[float, dict[str, float], str]:
    if answer.status != 200:
        said = answer.body[: 4 * MAX_SHOWN_CHARS].decode("utf-8", "replace")[:MAX_SHOWN_CHARS]
        why = f"it answered {answer.status}: {said}"
        if answer.status in _OVERLOADED or answer.status >= 500:
            raise _Again(why, answer.retry_after_s)
        raise EnvironmentFailed("judge", f"{spec.model} cannot be asked: {why}")
    try:
        completion = _Completion.model_validate_json(answer.body)
        said = completion.choices[0].message.content or ""
        score = spec.score(said)
    except (ValidationError, IndexError):
        raise _Again("its answer is no chat completion") from None
    except NoScore as error:
        raise _Again(str(error)) from None
    usage = completion.usage or _Usage()
    metrics: dict[str, float] = {
        "judge_prompt_tokens": usage.prompt_tokens,
        "judge_completion_tokens": usage.completion_tokens,
    }
    return score, metrics, said


class JudgedAgent:
    """A ``PlayedSession`` whose score is what the judge says."""

    def __init__(
        self,
        session: PlayedSession,
        setting: EpisodeSetting,
        spec: JudgeSpec,
        judges: Judges,
        last_turn: Callable[[], tuple[Sequence[int], Sequence[int]] | None],
        name: str,
    ) -> None:
        """``last_turn``: that the agent had, as ids that it answers and ids of what it was told. ``name``: of this
        attempt, where it is judged."""
        self._session = session
        self._setting = setting
        self._spec = spec
        self._judges = judges
        self._last_turn = last_turn
        self._name = name
        self._verdict = JudgeVerdict(0.0, {})
        self.evidence: Evidence = NOTHING
        self._evidence_bytes = 0

    @property
    def metrics(self) -> Mapping[str, float]:
        return {**self._session.metrics, **self._verdict.metrics}

    def keep_evidence(self, most_bytes: int) -> None:
        self._evidence_bytes = most_bytes

    def offer(self, llm: Llm) -> None:
        self._session.offer(llm)

    async def start(self, task: Mapping[str, JSON], seed: int) -> Start:
        return await self._session.start(task, seed)

    async def handed_out(self) -> str:
        return await self._session.handed_out()

    async def ended(self) -> None:
        await self._session.ended()

    async def score(self) -> tuple[float, dict[str, float]]:
        """Raises ``EnvironmentFailed``; an agent that never had a turn has no reward."""
        turn = self._last_turn()
        if turn is None:
            raise EnvironmentFailed("score", NO_REWARD)
        prompt = await self._prompt(*turn)
        self._verdict = await self._judges.verdict(self._spec, prompt, self._name, self._setting.counters)
        if self._evidence_bytes:
            self.evidence = gathered([(JUDGE, self._verdict.said)], self._evidence_bytes)
        return self._verdict.score, {"judge": self._verdict.score}

    async def _prompt(self, asked: Sequence[int], said: Sequence[int]) -> str:
        spec, codec = self._spec, self._setting.codec
        task: dict[str, JSON] = json.loads(await self._session.handed_out()) if spec.asks_for_task else {}
        try:
            return spec.ask(lambda: conversation_of(asked, said, codec), read(codec, said, ()).text, task)
        except NoSuchField as error:
            raise EnvironmentFailed("judge", str(error)) from None


def conversation_of(asked: Sequence[int], answer: Sequence[int], codec: ChatCodec) -> str:
    """One message in a line each, as JSON, so that no text can pose as another message."""
    said = list(answer)
    while said and said[-1] in codec.stop_ids:
        said.pop()
    last: ShownMessage = {"role": "assistant", "text": codec.tokenizer.decode(said)}
    lines = [json.dumps(one, ensure_ascii=False) for one in (*messages_in(asked, codec.tokenizer), last)]
    return _within("\n".join(lines))


def _within(text: str) -> str:
    over = len(text) - MAX_CONVERSATION_CHARS
    if over <= 0:
        return text
    head = MAX_CONVERSATION_CHARS // 4
    return f"{text[:head]}\n[... {over} characters left out ...]\n{text[head + over :]}"
