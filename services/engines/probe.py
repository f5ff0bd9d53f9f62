"""Checks with a few short requests that an engine samples as a job relies on, before it is bound to one.

Rule: every observable promise is tested, not believed: temperature, stop tokens, request ids, separate caches, control
calls. A router in between that drops a field is found here; in a training run it would only cause drift. Answers are
compared only where the same weights gave them all. Weights are not checked (the parity gate compares them), and nothing
but the engine's cache changes.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence

from services.engines.protocol import Engine, EngineProtocolError, EngineRejected, Generation

# Ids of every vocabulary, and no prefix of any other prompt.
_PROMPT = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29)
# High, so that samples differ and their log-probs are far from those at 1; vLLM takes no higher one.
_TEMPERATURE = 2.0
_NUM_SAMPLES = 8
# Log-probs closer than this, in nats at temperature 1, reveal nothing about the temperature.
_MIN_GAP = 0.5
# Weights change a second or more apart, and a test takes less.
_TESTS = 5


async def problem_of(client: Engine) -> str | None:
    """The reason why its samples must not be trained on, or None. Raises EngineUnavailable."""
    try:
        return (
            await _control(client)
            or await _caches(client)
            or await _under_one_label(_temperature, client)
            or await _under_one_label(_stops, client)
        )
    except (EngineProtocolError, EngineRejected) as error:
        return f"it fails the self-test: {error}"


async def _control(client: Engine) -> str | None:
    try:
        await client.abort(uuid.uuid4().hex)
    except EngineRejected as error:
        return f"it takes no control calls: use the engine's own address, not a router's ({error})"
    return None


async def _caches(client: Engine) -> str | None:
    """Requests of two versions must not share keys and values."""
    for _ in range(2):
        answer = await client.generate(
            _PROMPT, max_new_tokens=2, temperature=1.0, stop_token_ids=[], extra_key=uuid.uuid4().hex
        )
        if answer.cached_tokens:
            return "it ignores extra_key: tokens of new weights would reuse keys and values of old ones"
    return None


async def _under_one_label(test: Callable[[Engine, set[str]], Awaitable[str | None]], client: Engine) -> str | None:
    """The finding of a test during which the weights stayed the same."""
    for _ in range(_TESTS):
        labels: set[str] = set()
        problem = await test(client, labels)
        if len(labels) <= 1:
            return problem
    return f"its weights changed during each of {_TESTS} self-tests: is another trainer at it?"


async def _temperature(client: Engine, labels: set[str]) -> str | None:
    """Gaps between log-probs shrink with the temperature, whatever the logits are. Adds the labels that it saw."""
    asks = [
        client.generate(_PROMPT, max_new_tokens=1, temperature=_TEMPERATURE, stop_token_ids=[])
        for _ in range(_NUM_SAMPLES)
    ]
    answers = [one for one in await asyncio.gather(*asks) if one.output_ids]
    labels.update(_labels(answers))
    reported = {one.output_ids[0]: one.logprobs[0] for one in answers}
    high, low = max(reported, key=reported.__getitem__), min(reported, key=reported.__getitem__)
    at_one = [await _logprob_at_one(client, token_id, labels) for token_id in (high, low)]
    gap, found = at_one[0] - at_one[1], reported[high] - reported[low]
    if abs(gap) < _MIN_GAP or abs(_TEMPERATURE * found - gap) <= 0.3 + 0.2 * abs(gap):
        return None
    return (
        f"its log-probs are not at the requested temperature: two tokens are {gap:.2f} apart at 1 and "
        f"{found:.2f} at {_TEMPERATURE:g}. For SGLang unset SGLANG_RETURN_ORIGINAL_LOGPROB, start vLLM with "
        f"--logprobs-mode processed_logprobs"
    )


def _labels(answers: Sequence[Generation]) -> set[str]:
    return {span.label for one in answers for span in one.spans}


async def _logprob_at_one(client: Engine, token_id: int, labels: set[str]) -> float:
    logprobs, label = await client.score([*_PROMPT, token_id])
    labels.add(label)
    return logprobs[-1]


async def _stops(client: Engine, labels: set[str]) -> str | None:
    first = await _greedy(client, [], labels)
    again = await _greedy(client, first[:1], labels)
    if again[:1] == first[:1] and len(again) > 1:
        return "it ignores stop_token_ids: turns would not end"
    return None


async def _greedy(client: Engine, stop_token_ids: Sequence[int], labels: set[str]) -> list[int]:
    answer = await client.generate(_PROMPT, max_new_tokens=3, temperature=0.0, stop_token_ids=stop_token_ids)
    labels.update(_labels([answer]))
    return answer.output_ids
