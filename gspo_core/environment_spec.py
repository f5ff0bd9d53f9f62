"""One environment of a job: what plays its episodes, within which limits, and in which processes.

One rule: a limit is described once, in `Limits`; what applies to an episode is resolved from the author's values, the
job's and the entry's. It loads no environment.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from gspo_core.documented import Documented, FreeForm
from gspo_core.judge_spec import JudgeSpec
from gspo_core.outbound import MAX_URL_CHARS
from gspo_core.placeholders import TASK_NAME, names_in

PositiveInt = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]

_CLASS = re.compile(r"[^\s:]+:[A-Za-z_][A-Za-z0-9_.]*")
_REGISTERED = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}(@[1-9][0-9]{0,7})?")


def _reference(text: str) -> str:
    if not _CLASS.fullmatch(text) and not _REGISTERED.fullmatch(text):
        raise ValueError("use package.module:Class, path/to/file.py:Class, or name@version of a registered environment")
    return text


# For keys that came after release 0.2.0: its processes refuse a job with a key that they do not know, so a job that
# does not use one is stored without it.
def is_none(section: Documented | str | int | None) -> bool:
    return section is None


def _function(text: str) -> str:
    if not _CLASS.fullmatch(text):
        raise ValueError("use package.module:function or path/to/file.py:function")
    return text


class ParseErrorPolicy(Documented):
    """What happens when a tool call of the policy cannot be read."""

    feedback: Count = 2
    """Unreadable turns in a row that are answered with the error, so that the policy can try again."""
    then: Literal["end"] = "end"
    """What happens at the next one: the episode ends with `parse_error`."""


class Limits(Documented):
    """Limits of an episode. Where one is left out, the environment author's value applies, else the default stated."""

    max_turns: PositiveInt | None = None
    """Assistant turns of an episode; the episode ends with `max_turns`. Default 16."""
    max_tool_calls: PositiveInt | None = None
    """Tool calls of an episode; the episode ends with `max_tool_calls`. Default 32."""
    max_episode_tokens: PositiveInt | None = None
    """Sampled tokens of an episode, all turns together; the episode ends with `max_tokens`. Default 8192."""
    max_context_tokens: PositiveInt | None = None
    """Prompt, tool output and sampled tokens of an episode together; the episode ends with `context_overflow`.
    The model's own limit applies too. Default 32768."""
    max_observation_chars: Annotated[int, Field(ge=100)] | None = None
    """Characters of one answer from an environment that the policy reads. A longer one loses its middle, and a line in
    its place says how much was left out. Default 100000."""
    reset_timeout_s: Seconds | None = None
    """Time for an environment to start an episode; exceeding it is a retried infrastructure failure. Default 60."""
    step_timeout_s: Seconds | None = None
    """Time for one tool call; beyond it the policy is told, or the episode ends with `tool_timeout`. Default 20."""
    score_timeout_s: Seconds | None = None
    """Time for computing the reward; exceeding it is an infrastructure failure. Default 30."""
    close_timeout_s: Seconds | None = None
    """Time for an environment to clean up; exceeding it is only counted. Default 10."""
    episode_timeout_s: Seconds | None = None
    """Wall-clock time of an episode, not counting waits for weights or for an engine; the episode ends with
    `episode_timeout`. Default 1800."""
    retries: Count | None = None
    """How often starting an episode is retried after an infrastructure failure. Default 2."""
    on_parse_error: ParseErrorPolicy | None = None
    """What happens when a tool call of the policy cannot be read. Default: feedback 2, then end."""
    on_truncation: Literal["score", "zero"] | None = None
    """The reward of an episode that hit a limit: `score` asks the environment as usual, `zero` is 0.
    Default score."""
    max_repetition_tokens: Annotated[int, Field(ge=8)] | None = None
    """A turn that repeats a piece of at most 64 tokens for this many tokens ends the episode with `repetition`, a limit
    like the others. Checked after every `chunk_tokens`. Default none."""
    overlong_tokens: PositiveInt | None = None
    """A penalty for the last this many of `max_episode_tokens`: the reward falls linearly over them, by 1 at the limit.
    Held-out episodes keep their reward. Default none."""


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """The limits that apply to an episode, all of them set. `Limits` describes each."""

    max_turns: int = 16
    max_tool_calls: int = 32
    max_episode_tokens: int = 8192
    max_context_tokens: int = 32768
    max_observation_chars: int = 100_000
    reset_timeout_s: float = 60.0
    step_timeout_s: float = 20.0
    score_timeout_s: float = 30.0
    close_timeout_s: float = 10.0
    episode_timeout_s: float = 1800.0
    retries: int = 2
    on_parse_error: ParseErrorPolicy = field(default_factory=ParseErrorPolicy)
    on_truncation: Literal["score", "zero"] = "score"
    max_repetition_tokens: int | None = None
    overlong_tokens: int | None = None

    @classmethod
    def resolve(cls, *layers: Limits) -> Self:
        """Later layers win: author of the environment, job, the job's entry for this environment."""
        given: dict[str, Any] = {}
        for layer in layers:
            values = {name.name: getattr(layer, name.name) for name in fields(cls)}
            given |= {name: value for name, value in values.items() if value is not None}
        return cls(**given)


class HostSpec(Documented):
    """Limits of the processes that an environment runs in. Where one is left out, its author's value (`hosting`)
    applies, else the default stated."""

    sessions_per_process: PositiveInt | None = None
    """Episodes that share a process. Default: 256 if every method is async, 16 if the environment is `replayable` or
    offers snapshots, else 1."""
    max_processes: PositiveInt | None = None
    """Processes per rollout worker. Episodes that do not fit wait for a place. Default 64."""
    memory_mb: PositiveInt | None = None
    """Memory of one process; beyond it the episode that acted ends with `env_crash`. Default 1024."""
    file_mb: PositiveInt | None = None
    """Size of a file that it may write; beyond it writing fails. Default 64."""
    tier: Literal["process", "wall", "container", "remote"] | None = Field(default=None, exclude_if=is_none)
    """The least that stands between it and the machine; in `container` and `remote` what its policy runs is there.
    Default: what the operator demands."""
    network: bool | None = Field(default=None, exclude_if=is_none)
    """It needs the network behind its wall, which the operator may refuse. Agents, and environments that a URL is given
    to, have it anyway. Default: no."""
    disk_mb: PositiveInt | None = Field(default=None, exclude_if=is_none)
    """Temporary files of all processes behind its wall together; they are kept in memory. Default 512."""
    num_processes: PositiveInt | None = Field(default=None, exclude_if=is_none)
    """Processes and threads behind its wall. Default 1024."""
    boot_timeout_s: Seconds = 120.0
    """Time for loading the environment; beyond it the worker cannot serve the job."""


# For a command: more than any shell would be given, less than would make a record large.
MAX_WORDS, MAX_WORD_CHARS = 64, 4096
MAX_PROMPT_CHARS = 65_536

_Word = Annotated[str, StringConstraints(min_length=1, max_length=MAX_WORD_CHARS, pattern=r"^[^\x00]+$")]


def _prompt(text: str) -> str:
    for name in names_in(text):
        if not TASK_NAME.fullmatch(name):
            raise ValueError(f"there is no {{{{{name}}}}}; use {{{{task}}}} or {{{{task.FIELD}}}}")
    return text


class AcpSpec(Documented):
    """The program of `command` speaks the Agent Client Protocol, version 1, on its stdin and stdout."""

    prompt: (
        Annotated[str, StringConstraints(min_length=1, max_length=MAX_PROMPT_CHARS), AfterValidator(_prompt)] | None
    ) = None
    """What it is asked; `{{task}}` and `{{task.FIELD}}` become the task. Left out: the texts in the task's field
    `prompts` one after another, or the text in its field `prompt` or `question`, else the task as JSON."""
    permissions: Literal["allow", "reject"] = "allow"
    """What it is answered when it asks whether it may use a tool."""
    login: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = None
    """The method of authentication that is named to it before its session begins, such as `gemini-api-key`. Left out:
    none."""


# Texts that differ from one request to the next; each is searched for in every request.
MAX_VOLATILE, MAX_VOLATILE_CHARS = 16, 256


def _volatile_name(name: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,31}", name):
        raise ValueError("a name has at most 32 characters: a letter, then letters, digits and _, all lower-case")
    return name


def _volatile(pattern: str) -> str:
    if not re.fullmatch(r"[^*\n]{3}[^\n]*", pattern):
        raise ValueError("a pattern begins with three characters that are no *, and is one line")
    return pattern


_VolatileName = Annotated[str, AfterValidator(_volatile_name)]
_Volatile = Annotated[str, StringConstraints(max_length=MAX_VOLATILE_CHARS), AfterValidator(_volatile)]


class AgentSpec(Documented):
    """How the agent is started, once an episode. With nothing given, `ref` names a function `run(task, llm)`."""

    url: Annotated[str, StringConstraints(max_length=MAX_URL_CHARS, pattern=r"^https?://[^\s]+$")] | None = None
    """A service that is sent the task, a base URL and a key with POST, and plays the episode before it answers.
    `ref` names what has the tasks."""
    command: Annotated[tuple[_Word, ...], Field(min_length=1, max_length=MAX_WORDS)] | None = None
    """A program and its arguments, started with the task, base URL and key in environment variables. `ref` names what
    has the tasks."""
    acp: AcpSpec | None = Field(default=None, exclude_if=is_none)
    """The program of `command` is spoken to by the Agent Client Protocol: it is asked the task in a session of its own.
    `{}` is enough."""
    pull: bool = False
    """Nothing is started: agents fetch the episodes by themselves, with `POST /v1/jobs/{id}/episodes:lease`. `ref`
    names what has the tasks, or a function beside them."""
    reward: Annotated[str, StringConstraints(max_length=1024), AfterValidator(_function)] | None = None
    """A function that judges the episode, apart from the agent: `package.module:function` or
    `path/to/file.py:function`. It stands in place of any `get_reward` beside `ref`, and runs where that would."""
    judge: JudgeSpec | None = None
    """A model that is asked for the reward, in place of any `get_reward`."""
    rewards: Literal["returned", "judge", "posted"] | None = Field(default=None, exclude_if=is_none)
    """Where rewards come from. `returned`: from the agent's end alone; `judge`: from `reward`, `judge` or `get_reward`
    alone; `posted`: the agent may post them with the key by which it samples, so the policy must not decide whether it
    does. Left out: the starter of the agent may post them with a key of its own; without a posted reward the judge's or
    the returned one counts."""
    rejected: Literal["mask", "train"] = Field(default="mask", exclude_if=lambda value: value == "mask")
    """What becomes of the other samples where an agent asks several times and continues one. `mask`: they are read and
    not trained; `train`: they get the episode's advantage like the chosen one."""
    unsupported: Literal["refuse", "say"] = Field(default="refuse", exclude_if=lambda value: value == "refuse")
    """What becomes of fields of a request that are not acted on here. `refuse`: the request is, by the field's name;
    `say`: it is answered without them, and the answer's header `x-gspo-ignored` names them. What belongs to the
    conversation, or what an answer is of no use without, is refused all the same."""
    volatile: Annotated[dict[_VolatileName, _Volatile], Field(max_length=MAX_VOLATILE)] = Field(
        default_factory=dict, exclude_if=lambda value: not value
    )
    """Texts that its agent writes anew into each request, such as the time or a nonce, each by a name of yours:
    `{"clock": "The time is *"}`. They are left out of system and user messages, or each turn would read all again.
    The first three characters are no `*`; `*` stands for what lies up to the nearest place in the line where the
    pattern goes on, and at its end for the rest of the line. A line of which nothing is left goes with its end. Of each
    pattern a thousand places in a request are looked at. The header `x-gspo-ignored` of a turn names what was left out
    (`volatile.clock`)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.reward is not None and self.judge is not None:
            raise ValueError("give one of reward and judge")
        if self.rewards in ("returned", "posted") and (self.reward or self.judge) is not None:
            raise ValueError(f"rewards: {self.rewards} leaves nothing to a judge: give no reward and no judge")
        if (self.url is not None) + (self.command is not None) + self.pull > 1:
            raise ValueError("give one of url, command and pull")
        if self.acp is not None and self.command is None:
            raise ValueError("acp says how a program is spoken to: give command too")
        return self

    @property
    def lives_elsewhere(self) -> bool:
        """It outlives the process that holds its episode."""
        return self.url is not None or self.pull


class EnvironmentSpec(Documented):
    """One environment of a job."""

    ref: Annotated[str, StringConstraints(max_length=1024), AfterValidator(_reference)]
    """Its class: `package.module:Class` or `path/to/file.py:Class`. Or a registered environment: `name@version`, or
    `name` for the newest version at the time the job is submitted."""
    config: FreeForm = Field(default_factory=dict)
    """Keyword arguments for the class. A registered version brings its own."""
    agent: AgentSpec | None = Field(default=None, exclude_if=is_none)
    """An agent plays the episodes and asks the gateway for its turns; `{}` is enough where `ref` names a function
    `run(task, llm)`. Left out: `ref` is a class whose methods the policy calls as tools."""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Its share of the groups, relative to the other environments' weights."""
    limits: Limits = Field(default_factory=Limits)
    """Limits for episodes of this environment; they override the job's."""
    host: HostSpec = Field(default_factory=HostSpec)
    """Limits of the processes that it runs in."""
    broken_reward: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """The reward of an episode whose own action broke its environment (`tool_timeout`, `env_crash`).
    Left out: the low end of the environment's `reward_range`, else 0."""
