"""What docs/dialects.md says of the fields of requests (`make docs` writes it)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from services.gateway.dialects.fields import ANTHROPIC_MESSAGES, GEMINI, OPENAI_CHAT, OPENAI_RESPONSES
from services.gateway.dialects.openai_responses import LEFT_OUT
from services.gateway.dialects.sent import Fields, Only, Rule

PAGE = Path(__file__).parents[2] / "docs" / "dialects.md"
TABLES: Mapping[str, Fields] = {
    "Chat Completions": OPENAI_CHAT,
    "Responses": OPENAI_RESPONSES,
    "Messages": ANTHROPIC_MESSAGES,
    "Gemini": GEMINI,
}
HEAD = """# Dialects: what an agent may send, and what becomes of it

The agent gateway speaks OpenAI's Chat Completions (`POST /v1/chat/completions`) and Responses (`POST /v1/responses`),
Anthropic's Messages (`POST /v1/messages`, `POST /v1/messages/count_tokens`) and Google's Gemini API
(`POST /v1beta/models/MODEL:generateContent`, `:streamGenerateContent?alt=sse` and `:countTokens`, also under `/v1/`),
whole and as streams, and lists its models (`GET /v1/models`, `GET /v1beta/models`), or tells of one
(`GET /v1/models/MODEL`, `GET /v1beta/models/MODEL`). The key of the episode is sent as
`Authorization: Bearer`, as `x-api-key` or as `x-goog-api-key`, whichever the client likes. A key in a URL (`?key=`) is
not read: Gemini's paths refuse it, the others pass it over.

Nothing is passed over in silence. A field is acted on; or the job decides instead, and the answer names it in the
header `x-gspo-ignored`; or it changes nothing; or it is refused by its name, with the reason. A field that is not
below is refused. With `agent.unsupported: say` a job has what would be refused passed over, and named in the same
header: but for what stands in the conversation itself, and for what an answer is of no use without (`vital`); talk
keys, which belong to no entry of a job's environments, have it refused always. The name
of a model is taken as it comes: the policy answers, and the header names `model` where it is called otherwise. An
answer to a talk key has the header `x-gspo-trace`, which names the conversation that keeps it.

Answers have a field that the dialects do not know, `policy_version`: which version of the policy sampled which
tokens. Those of Chat Completions have two more, as other servers of open models do, where there is something to say:
a choice's `stop_reason` is the stop text that ended it, and a message's `reasoning_content` its thoughts. The `id` of
an answer (Gemini's `responseId`) is that of the turn, for a reward of its own.

| an answer that is none | OpenAI's dialects | Anthropic's | Gemini's | sent again |
|---|---|---|---|---|
| the request cannot be acted on | 400 `invalid_request` | 400 `invalid_request_error` | 400 `INVALID_ARGUMENT` | no |
| no episode has this key | 401 `invalid_api_key` | 401 `authentication_error` | 401 `UNAUTHENTICATED` | no |
| its limits are spent | 400 `rollout_stopped` | 400 `invalid_request_error` | 400 `FAILED_PRECONDITION` | no |
| the prompt is too long | 400 `context_length_exceeded` | 400, "prompt is too long" | 400, "input token count" | no |
| no such route, or model | 404 `not_found`, `model_not_found` | 404 `not_found_error` | 404 `NOT_FOUND` | no |
| another method | 405 `method_not_allowed` | 405 `invalid_request_error` | 405 `INVALID_ARGUMENT` | no |
| the episode is over, or another attempt's | 409 `episode_ended` | 409 `invalid_request_error` | 409 `ABORTED` | no |
| its body is beyond 16 MiB | 413 `body_too_large` | 413 `request_too_large` | 413 `INVALID_ARGUMENT` | no |
| too many at once | 429 `too_many_requests` | 429 `rate_limit_error` | 429 `RESOURCE_EXHAUSTED` | yes, later |
| not now | 503 `unavailable` | 529 `overloaded_error` | 503 `UNAVAILABLE` | yes, later |

Clients are told so by `x-should-retry`, and when by `retry-after`; theirs obey. A request that a client marks as sent
again (`x-stainless-retry-count`), or that has the `Idempotency-Key` of an earlier one, gets the answer of that one.
While a stream waits, it shows signs of life that its dialect has: a comment, a `ping`, another
`response.in_progress`, and empty lines in Gemini's, whose clients take a comment for data. An error in its middle is
told as the dialect tells it.

A stream tells a call, its name and all its arguments, when the end of the call was sampled, and goes on; what can not
be read as a call is never begun as one. What stands behind a call and is none is told as text behind the calls. Calls
that only their shape tells from text (Llama's) are told at the end of the turn. Ids of calls are the same in a stream,
in a whole answer, and when either is asked for again.

A stop text is sampled, recorded and trained, and not told: the text ends before it. Messages name it as
`stop_sequence`, Chat Completions as `stop_reason`. It may come back behind the answer, with more words behind it or
without, and the conversation goes on behind the tokens that were sampled.

Where `tool_choice` requires a call, of any tool or of one by its name, the answer is begun for the policy with the ids
of such a call; they are read, not sampled, and not trained. What the policy makes of it is given as a call if it is
one, and as text otherwise, as always. With `none` the tools stay in the prompt, so that the conversation goes on as it
was, and what the policy calls all the same is given as text. A model whose calls have no beginning of their own is not
made to call: the request is refused.

Where one call at most is asked for (`parallel_tool_calls: false`, `disable_parallel_tool_use`), the turn ends behind
the first that the answer gives; what was sampled behind it is neither recorded nor told. Only calls in a thought that
the policy never ended may be several, since its end could still have come: those behind the first are given as text.

`seed`, any whole number of 64 bits, says which sample of the job's distribution it is to be: the same request with
the same seed draws the same tokens wherever and whenever it is asked for, as long as the same weights sample. It
decides the numbers behind the tokens, in all pieces in which an answer is sampled, also when another gateway goes on
with it; tokens behind a switch of weights are those of the new weights, as `policy_version` says. What is recorded
and trained is what was sampled, with its own log-probs. A request with another seed is another request. The same one
once more is another turn, a branch `resampled` with equal tokens. So members of a group that send equal seeds play
equal episodes, from which nothing is learned: a seed belongs to serving and to finding faults, or differs from
episode to episode. The embedded engine draws the same tokens but for the rounding of what is computed beside other
requests; vLLM does where the answer is asked for in the same pieces; SGLang passes seeds over unless it runs with
`--enable-deterministic-inference`, and then does as the embedded engine.

A reward is `POST /v1/episode/reward`, by the episode's `reward_key`, with `reward` (a finite number), `turn` (the
`id` of an answer; without it, the reward is the episode's) and `token` (any text: with an equal one it is the same
reward again, and is answered as it was, also when the episode has ended). One that leaves the `reward_range` of the
environment, or brings the sum of all posted out of it, is refused ([agents.md](agents.md#rewards)).
`POST /v1/episode/finish` ends the episode.

In Responses, tools that run at the provider (LEFT_OUT) are left out, and the answer names them, as `tools.web_search`;
any other type of tool is refused by its name. `instructions` are one text. What is said of a namespace as a whole is
not shown to the policy, and the answer names it, as `tools.namespace.description`.

In Gemini's dialect `model` and `stream` stand in the path; a body may say the same. Names of fields are taken as
`functionCall` and as `function_call`, types of schemas as `OBJECT` and as `object`. Neighbouring contents of the model
are one message. A call needs no id: a result belongs to the call of its id, or else to the first call of its name that
has none yet. What a result's only field holds, if it is `output` or `result`, is its text; any other result is told as
JSON. Tools of the provider (`googleSearch`, ...) are left out and named. A stop text is not named.

This page is written by `make docs` from the table that the gateway reads
(`services/gateway/dialects/fields.py`).
"""


def written() -> str:
    left_out = ", ".join(f"`{kind}`" for kind in sorted(LEFT_OUT))
    return HEAD.replace("LEFT_OUT", left_out) + "".join(
        f"\n## {name}\n\n" + "".join(section(fields)) for name, fields in TABLES.items()
    )


def section(fields: Fields) -> Iterator[str]:
    yield "| where | acted on | the job decides | changes nothing |\n|---|---|---|---|\n"
    for place, rules in fields.items():
        told = [names(rules, kind) for kind in ("Read", "Decided", "Harmless")]
        if any(told):
            yield f"| {f'`{place}`' if place else 'the request'} | {' | '.join(told)} |\n"
    yield "\n| allowed only so | otherwise |\n|---|---|\n"
    for place, rules in fields.items():
        for name, rule in rules.items():
            if isinstance(rule, Only):
                where = f"{place}.{name}".lstrip(".")
                values = " or ".join(f"`{msgspec.json.encode(one).decode()}`" for one in rule.values)
                vital = " (vital)" if rule.is_vital else ""
                yield f"| `{where}`: {values or 'not at all'} | {rule.why}{vital} |\n"


def names(rules: Mapping[str, Rule], kind: str) -> str:
    return ", ".join(f"`{name}`" for name, rule in rules.items() if type(rule).__name__ == kind)
