"""Request and response bodies of the default engine protocol, as far as the embedded engine speaks them.

Rule: a request that the engine cannot serve exactly is refused with a clean 400 and a reason, and so is input that
would crash a real engine; it never guesses and never ignores a parameter that shapes the distribution. Nothing is
executed here: bodies become ``GenerateRequest`` values and ended requests become bodies.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypeAlias, TypedDict, TypeVar

import msgspec

from services.engine.sampling import request_seed
from services.engine.scheduler import Finish, GenerateRequest

# In the order of the protocol's own refusal of unknown keys.
_SAMPLING_KEYS = (
    *("max_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "n", "json_schema", "regex"),
    *("ebnf", "structural_tag", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"),
    *("stream_interval", "logit_bias", "sampling_seed", "custom_params", "beam_width", "watermark", "choice"),
)
# Parameters that would change the distribution or the answer's shape: allowed only with these values, or absent.
_NEUTRAL: dict[str, tuple[str | int | list[str] | dict[str, float] | None, ...]] = {
    "stop": (None, "", []),
    "stop_regex": (None, "", []),
    "top_p": (None, 1),
    "top_k": (None, -1),
    "min_p": (None, 0),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_new_tokens": (None, 0),
    "n": (None, 1),
    "logit_bias": (None, {}),
    "beam_width": (None, 0, 1),
    **dict.fromkeys(
        ("json_schema", "regex", "ebnf", "structural_tag", "custom_params", "watermark", "choice"), (None,)
    ),
}
_DEFAULT_MAX_NEW_TOKENS = 128
_Body = TypeVar("_Body")


class BadRequest(Exception):
    """Answered with 400 and ``body``."""

    def __init__(self, body: Mapping[str, str | int | Mapping[str, str] | None]) -> None:
        super().__init__(str(body))
        self.body = body


def invalid_value(message: str) -> BadRequest:
    return BadRequest({"error": {"message": message}})


def invalid_body(message: str) -> BadRequest:
    return BadRequest({"object": "error", "message": message, "type": "Bad Request", "param": None, "code": 400})


class _Sampling(msgspec.Struct):
    max_new_tokens: int | None = None
    temperature: float | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    sampling_seed: int | None = None


class _Generate(msgspec.Struct):
    input_ids: list[int] | None = None
    rid: str | None = None
    sampling_params: dict[str, Any] | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    token_ids_logprob: list[int] | None = None
    return_prompt_token_ids: bool | None = None
    stream: bool | None = None
    extra_key: str | None = None


class AbortBody(msgspec.Struct):
    rid: str | None = ""
    abort_all: bool = False


class PauseBody(msgspec.Struct):
    mode: str = "abort"


class UpdateFromDiskBody(msgspec.Struct):
    model_path: str
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class UpdateFromDeltasBody(msgspec.Struct):
    paths: list[str]
    base_version: str
    weight_version: str
    flush_cache: bool = True


class UpdateFromAdapterBody(msgspec.Struct):
    path: str
    weight_version: str
    flush_cache: bool = True


class UpdateLabelBody(msgspec.Struct):
    new_version: str
    abort_all_requests: bool = True


def read_body(content: bytes, kind: type[_Body]) -> _Body:
    try:
        return msgspec.json.decode(content or b"{}", type=kind)
    except msgspec.DecodeError as error:
        raise invalid_body(str(error)) from error


class GenerateReader:
    """Turns the body of a generate call into a request that this model can run."""

    def __init__(self, *, vocab_size: int, context_length: int, eos_ids: frozenset[int], engine_seed: int) -> None:
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._eos_ids = eos_ids
        self._engine_seed = engine_seed

    def read(self, content: bytes) -> tuple[GenerateRequest, AnswerRenderer]:
        body = read_body(content, _Generate)
        input_ids = self._input_ids(body)
        if body.logprob_start_len not in (None, -1):
            raise invalid_value("the embedded engine scores prompts (logprob_start_len) with max_new_tokens 0 only")
        params = self._sampling(body.sampling_params or {})
        max_new_tokens = _DEFAULT_MAX_NEW_TOKENS if params.max_new_tokens is None else params.max_new_tokens
        self._check_lengths(len(input_ids), max_new_tokens)
        temperature = 1.0 if params.temperature is None else params.temperature
        if not (math.isfinite(temperature) and temperature >= 0):
            raise invalid_value(f"temperature must be a non-negative finite number, got {temperature:g}.")
        rid = body.rid or uuid.uuid4().hex
        seed = request_seed(self._engine_seed, rid) if params.sampling_seed is None else params.sampling_seed
        stops = frozenset() if params.ignore_eos else frozenset(params.stop_token_ids or ()) | self._eos_ids
        request = GenerateRequest(
            rid=rid,
            prompt=input_ids,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            stop_token_ids=stops,
            seed=seed % 2**64,
            cache_space=body.extra_key,
            done=asyncio.get_running_loop().create_future(),
        )
        prompt = input_ids if body.return_prompt_token_ids else None
        return request, AnswerRenderer(with_logprobs=bool(body.return_logprob), prompt_token_ids=prompt)

    def scoring(self, content: bytes) -> tuple[list[int], str] | None:
        """Ids and request id, if the body asks only for the log-probs of its input, without sampling."""
        body = read_body(content, _Generate)
        params = body.sampling_params or {}
        if body.logprob_start_len != 0 or params.get("max_new_tokens") != 0 or not body.return_logprob:
            return None
        input_ids = self._input_ids(body)
        self._check_lengths(len(input_ids), 1)
        return input_ids, body.rid or uuid.uuid4().hex

    def _input_ids(self, body: _Generate) -> list[int]:
        for name in ("stream", "top_logprobs_num", "token_ids_logprob"):
            if getattr(body, name):
                raise invalid_value(f"the embedded engine does not offer {name}")
        if body.input_ids is None:
            raise invalid_value("Either text, input_ids or input_embeds should be provided.")
        if not body.input_ids:
            raise invalid_value("input_ids cannot be empty.")
        if min(body.input_ids) < 0 or max(body.input_ids) >= self._vocab_size:
            raise invalid_value(f"input_ids hold an id outside of the vocabulary [0, {self._vocab_size})")
        return body.input_ids

    def _sampling(self, given: dict[str, Any]) -> _Sampling:
        for name, value in given.items():
            if name not in _SAMPLING_KEYS:
                known = ", ".join(f"`{key}`" for key in _SAMPLING_KEYS)
                raise BadRequest({"error": f"unknown field `{name}`, expected one of {known}"})
            if name in _NEUTRAL and value not in _NEUTRAL[name]:
                raise invalid_value(
                    f"the embedded engine samples from the whole distribution: {name}={value!r} is not offered"
                )
        try:
            return msgspec.convert(given, _Sampling)
        except msgspec.ValidationError as error:
            raise invalid_body(f"sampling_params: {error}") from error

    def _check_lengths(self, num_input: int, max_new_tokens: int) -> None:
        context = self._context_length
        if max_new_tokens < 1:
            raise invalid_value(f"max_new_tokens must be at least 1, got {max_new_tokens}.")
        if num_input >= context:
            raise invalid_value(
                f"The input ({num_input} tokens) is longer than the model's context length ({context} tokens)."
            )
        if num_input + max_new_tokens > context:
            raise invalid_value(
                f"Requested token count exceeds the model's maximum context length of {context} tokens: "
                f"{num_input} in the input and {max_new_tokens} for the completion."
            )


_TokenEntry: TypeAlias = tuple[float | None, int, None]


class LabelSpan(TypedDict):
    version: str
    start: int
    end: int


class CachedTokens(TypedDict):
    device: int
    host: int


class AnswerMeta(TypedDict, total=False):
    """Requests that never ran, and callers that asked for no log-probs, get fewer of these."""

    id: str
    finish_reason: Finish | None
    prompt_tokens: int
    weight_version: str
    num_retractions: int
    input_token_logprobs: list[_TokenEntry]
    output_token_logprobs: list[_TokenEntry]
    output_token_logprobs_length: int
    completion_tokens: int
    reasoning_tokens: int
    cached_tokens: int
    cached_tokens_details: CachedTokens | None
    dp_rank: None
    weight_versions: list[LabelSpan]
    e2e_latency: float
    response_sent_to_client_ts: float


class GenerateAnswer(TypedDict):
    text: str
    output_ids: list[int]
    meta_info: AnswerMeta
    prompt_token_ids: NotRequired[Sequence[int]]


def scored(input_ids: Sequence[int], logprobs: Sequence[float], label: str, rid: str) -> GenerateAnswer:
    """The answer to a scoring request: nothing is sampled; the first token has no log-prob."""
    entries: list[_TokenEntry] = [(None, input_ids[0], None)]
    entries += [(logprob, token_id, None) for logprob, token_id in zip(logprobs, input_ids[1:], strict=True)]
    meta: AnswerMeta = {
        "id": rid,
        "finish_reason": {"type": "length", "length": 0},
        "prompt_tokens": len(input_ids),
        "weight_version": label,
        "num_retractions": 0,
        "input_token_logprobs": entries,
        "output_token_logprobs": [],
        "output_token_logprobs_length": 0,
        "completion_tokens": 0,
        "cached_tokens": 0,
        "weight_versions": [{"version": label, "start": 0, "end": 0}],
    }
    return {"text": "", "output_ids": [], "meta_info": meta}


class AnswerRenderer:
    """Renders an ended request as its caller asked."""

    def __init__(self, *, with_logprobs: bool, prompt_token_ids: Sequence[int] | None) -> None:
        self._with_logprobs = with_logprobs
        self._prompt_token_ids = prompt_token_ids

    def __call__(self, request: GenerateRequest, label: str, text: str) -> GenerateAnswer:
        num = len(request.output_ids)
        meta: AnswerMeta = {"id": request.rid, "finish_reason": request.finish}
        cached = request.cached_tokens
        if cached is not None:
            meta["prompt_tokens"] = len(request.prompt)
        meta["weight_version"] = label
        if cached is not None:
            meta["num_retractions"] = request.num_retractions
        if self._with_logprobs:
            pairs = zip(request.logprobs, request.output_ids, strict=True)
            entries: list[_TokenEntry] = [(logprob, token_id, None) for logprob, token_id in pairs]
            meta |= {
                "input_token_logprobs": [],
                "output_token_logprobs": entries,
                "output_token_logprobs_length": num,
            }
        meta["completion_tokens"] = num
        if cached is not None:
            meta |= {
                "reasoning_tokens": 0,
                "cached_tokens": cached,
                "cached_tokens_details": {"device": cached, "host": 0} if cached else None,
                "dp_rank": None,
            }
        meta["weight_versions"] = [
            {"version": name, "start": start, "end": end} for name, start, end in request.spans()
        ]
        meta["e2e_latency"] = time.perf_counter() - request.arrived_s
        meta["response_sent_to_client_ts"] = time.time()
        answer: GenerateAnswer = {"text": text, "output_ids": request.output_ids, "meta_info": meta}
        if self._prompt_token_ids is not None:
            answer["prompt_token_ids"] = self._prompt_token_ids
        return answer
