"""``gspo eval``: plays an environment with a model or an API, and says what that shows."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import math
import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx

from gspo_core.cli.command import CommandError
from gspo_core.cli.connection import with_scheme
from gspo_core.cli.env import CallersPath, json_object
from gspo_core.cli.service import local_policies
from gspo_core.cli.terminal import say
from gspo_core.env import (
    AgentEnvironment,
    AgentStart,
    Environment,
    InvalidEnvironment,
    NeedsAgent,
    load_environment,
)
from gspo_core.evaluation.chat_completions import Api, ChatCompletions, only_model
from gspo_core.evaluation.episode import World
from gspo_core.evaluation.evaluation import (
    EvalSetting,
    OtherSetting,
    chosen_tasks,
    evaluate,
    open_folder,
    require_folder,
)
from gspo_core.evaluation.played import REPORT_FILE, Played, SettingDamaged, read_played, read_setting, write_whole
from gspo_core.evaluation.policy import EvaluatedPolicy, LocalPolicyOrder, PolicyUnusable
from gspo_core.evaluation.report import EvalReport, compare, difference_lines
from gspo_core.json_value import JSON
from gspo_core.spec import EpisodeLimits, Limits
from gspo_core.types import Split

# A thinking model may take long; the patience of each request is another matter.
_ANSWER_S = 600.0
_CONNECT_S = 10.0
_TELL_EVERY = 10
_ADDRESS = ("http://", "https://")
_MAX_NEW_TOKENS = 1024
_KEY_ENV = "OPENAI_API_KEY"
_OF_A_MODEL_HERE = ("--max-new-tokens", "--chat", "--device")
_OF_AN_API = ("--body", "--key-env")
_OF_THE_ASKING = ("--temperature", "--max-new-tokens", "--body")


def run(arguments: argparse.Namespace) -> int:
    if arguments.n < 1 or arguments.samples < 1 or arguments.concurrency < 1:
        raise CommandError("--n, --samples and --concurrency must be at least 1")
    if arguments.temperature is not None and not math.isfinite(arguments.temperature):
        raise CommandError(f"--temperature {arguments.temperature} is no temperature")
    with CallersPath():
        evaluation = _Evaluation.load(arguments)
        try:
            return asyncio.run(evaluation.run())
        except (PolicyUnusable, OtherSetting, SettingDamaged) as error:
            raise CommandError(str(error)) from error
        except KeyboardInterrupt:
            if evaluation.folder.is_dir():
                print(f"\nwhat was played is kept: add --out {evaluation.folder} to go on", file=sys.stderr)
            raise


@dataclass(frozen=True, slots=True)
class _Side:
    """A policy that plays, and where its episodes are kept."""

    setting: EvalSetting
    key_env: str
    folder: Path


@dataclass
class _Evaluation:
    arguments: argparse.Namespace
    environment: Environment
    config: Mapping[str, JSON]
    agent: Mapping[str, JSON] | None
    split: Split
    limits: EpisodeLimits
    source: str
    folder: Path

    @classmethod
    def load(cls, arguments: argparse.Namespace) -> _Evaluation:
        ref, config = _ref_and_config(arguments.env, arguments.config)
        arguments.env = ref
        asked = None if arguments.agent is None else json_object(arguments.agent, "--agent", "as a job has it")
        try:
            environment, agent = _loaded(ref, config, asked)
            limits = _limits(environment, arguments.limits)
        except InvalidEnvironment as error:
            raise CommandError(str(error)) from error
        given = arguments.split or (Split.EVAL if environment.num_tasks(Split.EVAL) else Split.TRAIN)
        split = Split(given)
        if not environment.num_tasks(split):
            raise CommandError(f"{ref} has no {split} tasks")
        own = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"  # two may begin within a second
        folder = Path(arguments.out or Path("gspo-eval") / own)
        return cls(arguments, environment, config, agent, split, limits, _digest(ref), folder)

    async def run(self) -> int:
        for model in (self.arguments.model, self.arguments.against):
            _require_address(model or "")
        kept, sides = self._sides()
        self._refuse_idle([side.setting.model for side in sides])
        theirs, problem = kept, ""
        async with AsyncExitStack() as stack:
            for side in sides:
                require_folder(side.folder, side.setting)
            policies = [await self._policy(stack, side) for side in sides]
            for side in sides:
                open_folder(side.folder, side.setting)
            ours = await self._report(sides[0], policies[0])
            found = self._keep(ours, theirs)
            for side, policy in zip(sides[1:], policies[1:], strict=True):
                try:
                    theirs = await self._report(side, policy)
                except PolicyUnusable as error:
                    problem = (
                        f"{error}\n{ours.setting.model} is kept in {self.folder}: add --out {self.folder} to go on"
                    )
                else:
                    found = self._keep(ours, theirs)
        self._tell(ours, theirs, found)
        if problem:
            raise CommandError(problem)
        return 0 if all(one is None or one.reward is not None for one in (ours, theirs)) else 1

    def _sides(self) -> tuple[EvalReport | None, list[_Side]]:
        """The evaluation that was kept, and who is to play."""
        given, against = self.arguments, self.arguments.against
        key_env = given.key_env or _KEY_ENV
        ours = _Side(self._setting(given.model), key_env, self.folder)
        if against is None:
            return None, [ours]
        if (kept := self._kept(Path(against))) is not None:
            return kept, [ours]
        theirs = _Side(self._setting(against), given.against_key_env or key_env, self.folder / "against")
        return None, [ours, theirs]

    def _refuse_idle(self, models: Sequence[str]) -> None:
        """Refuses options that no player would use. Raises CommandError."""
        idle: dict[str, str] = {}
        if isinstance(self.environment, AgentEnvironment):
            idle |= dict.fromkeys(_OF_THE_ASKING, "says how a model is asked, and this agent asks by itself")
        are_apis = [model.startswith(_ADDRESS) for model in models]
        if all(are_apis):
            idle |= dict.fromkeys(
                _OF_A_MODEL_HERE, "is of a model here, and none plays; --body is of an API's requests"
            )
        if not any(are_apis):
            idle |= dict.fromkeys(_OF_AN_API, "is of an API, and none plays")
        if not any(are_apis[1:]):
            idle["--against-key-env"] = "is of an API to play against, and none is"
        for option, why in idle.items():
            if getattr(self.arguments, option[2:].replace("-", "_")) is not None:
                raise CommandError(f"{option} {why}")

    def _kept(self, folder: Path) -> EvalReport | None:
        kept = read_setting(folder)
        if kept is None:
            return None
        setting = self._setting(str(kept["model"]))
        if differing := setting.plays_the_same(kept):
            raise OtherSetting(f"{folder} cannot be compared with: it has another {', '.join(differing)}")
        episodes = read_played(folder, with_messages=False)
        return EvalReport(setting, [episodes[place] for place in setting.places() if place in episodes])

    def _keep(self, ours: EvalReport, theirs: EvalReport | None) -> dict[str, JSON]:
        found = ours.to_json() | {"folder": str(self.folder)}
        if theirs is not None:
            both = compare(ours, theirs)
            found |= {"against": theirs.to_json(), "difference": None if both is None else both.to_json()}
        write_whole(self.folder / REPORT_FILE, found)
        return found

    def _tell(self, ours: EvalReport, theirs: EvalReport | None, found: Mapping[str, JSON]) -> None:
        if self.arguments.json:
            print(json.dumps(found, ensure_ascii=False, indent=2).encode("utf-8", "replace").decode())
            return
        say(*ours.lines())
        if theirs is not None:
            both = compare(ours, theirs)
            say(*theirs.lines(), *difference_lines(both, ours.setting.model, theirs.setting.model))
        say(f"kept in {self.folder}: gspo episodes {self.folder}")

    async def _report(self, side: _Side, policy: EvaluatedPolicy) -> EvalReport:
        setting = side.setting
        world = World(self.environment, self.split, self.limits, self._max_new_tokens, time.monotonic)
        progress = _Progress(setting.model, len(setting.places()), quiet=not sys.stderr.isatty())
        episodes = await evaluate(
            setting, world, policy, side.folder, concurrency=self.arguments.concurrency, tell=progress.tell
        )
        progress.end()
        return EvalReport(setting, episodes)

    @property
    def _max_new_tokens(self) -> int:
        given: int | None = self.arguments.max_new_tokens
        return _MAX_NEW_TOKENS if given is None else given

    def _setting(self, model: str) -> EvalSetting:
        given = self.arguments
        tasks = chosen_tasks(self.environment.num_tasks(self.split), given.n, given.seed)
        sampling: dict[str, JSON] = {"temperature": given.temperature, "max_new_tokens": self._max_new_tokens}
        sampling |= {"chat": given.chat, "body": given.body}
        limits = {} if given.limits is None else json_object(given.limits, "--limits", "as a job has it")
        return EvalSetting(
            model=model,
            environment=given.env,
            config=self.config,
            agent=self.agent,
            split=self.split.value,
            tasks=tasks,
            samples=given.samples,
            seed=given.seed,
            sampling=sampling,
            limits=limits,
            source=self.source,
        )

    async def _policy(self, stack: AsyncExitStack, side: _Side) -> EvaluatedPolicy:
        policy = await self._opened(stack, side.setting.model, side.key_env)
        if isinstance(self.environment, AgentEnvironment):
            policy.llm("")  # refused now rather than when the other side was played
        return policy

    async def _opened(self, stack: AsyncExitStack, model: str, key_env: str) -> EvaluatedPolicy:
        given = self.arguments
        if model.startswith(_ADDRESS):
            return await self._api(stack, model, os.environ.get(key_env) or None)
        chat = {} if given.chat is None else json_object(given.chat, "--chat", "as a job has it")
        order = LocalPolicyOrder(
            model=model,
            temperature=1.0 if given.temperature is None else given.temperature,
            chat=chat,
            device=given.device or "auto",
            seed=given.seed,
            api_url=with_scheme(given.url),
        )
        return await stack.enter_async_context(local_policies().open_policy(order))

    async def _api(self, stack: AsyncExitStack, address: str, key: str | None) -> EvaluatedPolicy:
        given = self.arguments
        url, _, name = address.partition("#")
        base_url = url.rstrip("/").removesuffix("/chat/completions")
        body: dict[str, JSON] = {} if given.temperature is None else {"temperature": given.temperature}
        body |= {} if given.body is None else json_object(given.body, "--body", "fields of a request")
        client = httpx.AsyncClient(
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(_ANSWER_S, connect=_CONNECT_S),
            limits=httpx.Limits(max_connections=given.concurrency),
        )
        await stack.enter_async_context(client)
        model = name or await only_model(base_url, client)
        return ChatCompletions(Api(base_url, model, key, body), client, time.monotonic)


class _Progress:
    """A line on stderr that is written over; without a terminal, a new line now and then."""

    def __init__(self, model: str, num_all: int, *, quiet: bool) -> None:
        self._model, self._num_all, self._quiet = model, num_all, quiet
        self._num_played, self._num_failed, self._sum = 0, 0, 0.0

    def tell(self, one: Played) -> None:
        self._num_played += 1
        self._num_failed += one.reward is None
        self._sum += one.reward or 0.0
        if not self._quiet:
            print(f"\r{self._line()} ", end="", file=sys.stderr, flush=True)
        elif self._num_played % max(1, self._num_all // _TELL_EVERY) == 0:
            print(self._line(), file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._num_played and not self._quiet:
            print(file=sys.stderr)

    def _line(self) -> str:
        num_scored = self._num_played - self._num_failed
        mean = f", mean reward {self._sum / num_scored:.3g}" if num_scored else ""
        failed = f", {self._num_failed} failed" if self._num_failed else ""
        return f"{self._model}: {self._num_played} of {self._num_all} episodes{mean}{failed}"


def _ref_and_config(env: str, config: str | None) -> tuple[str, dict[str, JSON]]:
    ref, comma, inline = env.partition(",")
    if comma and config is not None:
        raise CommandError("give the config behind the comma of --env or with --config, not both")
    text = inline if comma else config
    if ":" not in ref:
        raise CommandError(f"--env {ref}: name a class or a function in a file or a module, as in {ref}:MyClass")
    return ref, {} if text is None else json_object(text, "the config", "the keyword arguments of the class")


def _require_address(model: str) -> None:
    """Refuses an API's address that is no URL or names no host."""
    if not model.startswith(_ADDRESS):
        return
    try:
        host = httpx.URL(model).host
    except httpx.InvalidURL as error:
        raise CommandError(f"{model} is no address: {error}") from None
    if not host:
        raise CommandError(f"{model} is no address: it names no host")


def _loaded(
    ref: str, config: Mapping[str, JSON], agent: Mapping[str, JSON] | None
) -> tuple[Environment, Mapping[str, JSON] | None]:
    try:
        start = None if agent is None else AgentStart.from_json(agent)
        if start is not None and start.judge is not None:
            raise CommandError("--agent: gspo eval asks no judge; a job does. Leave judge out, and name a reward")
        return load_environment(ref, config, agent=start), agent
    except NeedsAgent:  # it can be nothing else
        return load_environment(ref, config, agent=AgentStart()), {}


def _limits(environment: Environment, given: str | None) -> EpisodeLimits:
    from pydantic import ValidationError

    text = {} if given is None else json_object(given, "--limits", "as a job has it")
    try:
        return EpisodeLimits.resolve(Limits.model_validate(dict(environment.limits)), Limits.model_validate(text))
    except ValidationError as error:
        first = error.errors()[0]
        raise CommandError(f"limits.{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _digest(ref: str) -> str:
    name = ref.rpartition(":")[0]
    file = Path(name) if name.endswith(".py") else Path(str(getattr(sys.modules.get(name), "__file__", "")))
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.is_file() else ""
