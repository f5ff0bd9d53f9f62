"""A model that judges episodes: how a job says whom to ask and what, and how a number is read from the answer.

Rule: an answer without the number that was asked for, or with one beyond its range, is no reward: never a guess, never
0. What the policy and the task say is put into the prompt once and read for no placeholders. Nothing is sent from here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from gspo_core.documented import Documented, FreeForm
from gspo_core.json_value import JSON
from gspo_core.outbound import MAX_URL_CHARS
from gspo_core.placeholders import TASK_NAME, filled, names_in

_NAMES = ("conversation", "answer")
_NUMBER = re.compile(r"[\s*:=]*([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?)(?![0-9.]*[0-9])")
# Fields of the request that the job, or the number that is read, decides.
_OURS = frozenset({"model", "messages", "stream", "n"})
MAX_PROMPT_CHARS = 65_536
# Looked at in one answer: reading them must not hold up others, whatever a judge writes.
MAX_OBJECTS, MAX_ANSWER_CHARS = 1000, 65_536


class NoScore(ValueError):
    """The answer holds no score. The text says why."""


def _prompt(text: str) -> str:
    names = names_in(text)
    for name in names:
        if name not in _NAMES and not TASK_NAME.fullmatch(name):
            raise ValueError(
                f"there is no {{{{{name}}}}}; use {{{{conversation}}}}, {{{{answer}}}} or {{{{task.FIELD}}}}"
            )
    if not set(_NAMES) & set(names):
        raise ValueError("the judge sees nothing of the episode: write {{conversation}} or {{answer}} into it")
    return text


class JudgeSpec(Documented):
    """A model behind an OpenAI-compatible API, which is asked for the reward when the agent has ended without one."""

    url: Annotated[str, StringConstraints(max_length=MAX_URL_CHARS, pattern=r"^https?://[^\s]+$")]
    """The base URL of its API, such as `https://api.example/v1`; `/chat/completions` is asked below it."""
    model: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    """Its name there."""
    prompt: Annotated[str, StringConstraints(min_length=1, max_length=MAX_PROMPT_CHARS), AfterValidator(_prompt)]
    """What it is asked. `{{conversation}}` becomes the messages up to the agent's last turn, one JSON object in a line
    each; `{{answer}}` the text of that turn; `{{task}}` and `{{task.FIELD}}` the task."""
    key: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")] | None = None
    """The name of its API key in `GSPO_JUDGE_KEYS` of the gateways. The key itself is in no job. Left out: none is
    sent."""
    field: Annotated[str, StringConstraints(min_length=1, max_length=128)] | None = None
    """The number is in this field of the last JSON object of the answer. Left out, `after` too: `score`."""
    after: Annotated[str, StringConstraints(min_length=1, max_length=128)] | None = None
    """The number stands behind the last occurrence of this text in the answer, such as `SCORE:`."""
    range: tuple[Annotated[float, Field(allow_inf_nan=False)], Annotated[float, Field(allow_inf_nan=False)]] = (
        0.0,
        1.0,
    )
    """The lowest and the highest score. An answer beyond them is asked for again. The score is the reward."""
    request: FreeForm = Field(default_factory=dict)
    """Further fields of the request, such as `temperature` or `response_format`."""
    timeout_s: Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False)] = 60.0
    """Time for one answer."""
    retries: Annotated[int, Field(ge=0, le=100)] = 8
    """How often it is asked again while it is away, overloaded, or its answer has no score; each pause is twice the
    last one, up to 30 s. After that the attempt has failed (`judge`)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.field is not None and self.after is not None:
            raise ValueError("give one of field and after")
        if not self.range[0] < self.range[1]:
            raise ValueError(f"range: {self.range[0]:g} must be below {self.range[1]:g}")
        if ours := sorted(_OURS & set(self.request)):
            raise ValueError(f"request.{ours[0]} is not yours to set")
        return self

    @property
    def asks_for_task(self) -> bool:
        return any(name.startswith("task") for name in names_in(self.prompt))

    def ask(self, conversation: Callable[[], str], answer: str, task: Mapping[str, JSON]) -> str:
        """The prompt for one episode. Raises ``NoSuchField``."""
        return filled(self.prompt, task, {"conversation": conversation, "answer": lambda: answer})

    def score(self, text: str) -> float:
        """Raises ``NoScore``."""
        if len(text) > MAX_ANSWER_CHARS:
            raise NoScore(f"its answer has more than {MAX_ANSWER_CHARS} characters")
        found = _behind(text, self.after) if self.after is not None else _in_field(text, self.field or "score")
        low, high = self.range
        if not low <= found <= high:
            raise NoScore(f"its score {found:g} is not between {low:g} and {high:g}")
        return found


def _behind(text: str, mark: str) -> float:
    place = text.rfind(mark)
    number = _NUMBER.match(text, place + len(mark)) if place >= 0 else None
    if number is None:
        raise NoScore(f"its answer has no number behind {mark!r}")
    return float(number[1])


def _in_field(text: str, field: str) -> float:
    decoder, place, last = json.JSONDecoder(), text.find("{"), None
    for _ in range(MAX_OBJECTS):
        if place < 0:
            break
        try:
            found, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            end = place + 1
        else:
            last = found.get(field, last)
        place = text.find("{", end)
    if last is None:
        raise NoScore(f"its answer has no JSON object with {field}")
    if isinstance(last, bool) or not isinstance(last, int | float) or not math.isfinite(last):
        raise NoScore(f"{field} in its answer is no number: {str(last)[:100]}")
    return float(last)
