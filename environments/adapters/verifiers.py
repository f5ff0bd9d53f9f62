"""Tasksets and harnesses of verifiers 0.4: its own rollout loop asks the gateway for its turns, its own rewards count.

It is an agent: `agent: {}` stands beside its `ref` in a job. ``env`` is the ``[env]`` block of verifiers. Rule: what
verifiers counts as a failed episode has no reward here; what is stopped at a limit, of its own or of the job, is scored
by it.
"""

# /// script
# dependencies = ["verifiers==0.4.0"]
# ///

from __future__ import annotations

import hashlib
import os
import re
import sys
import tomllib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_core.env import InvalidEnvironment, Llm
from gspo_core.json_value import JSON

if TYPE_CHECKING:
    from verifiers.v1.configs.env import EnvConfig
    from verifiers.v1.episode import Episode
    from verifiers.v1.runtimes import Runtime
    from verifiers.v1.task import Task
    from verifiers.v1.trace import Trace

    from gspo_core.env import Context

_SCRIPT = re.compile(r"^# /// script\s*$\n(?P<lines>(?:^#(?: .*)?$\n)+?)^# ///\s*$", re.MULTILINE)

# What the gateway refuses a turn with at a limit of the job, in each dialect.
_LIMIT = re.compile(r'"message":\s*"rollout stopped: (\w+)"')


class Verifiers:
    """Made once in each process: the tasks are loaded with it."""

    def __init__(
        self, env: dict[str, JSON], *, num_tasks: int = 1000, num_eval_tasks: int = 0, shuffle: int | None = None
    ) -> None:
        """``env`` has at least ``taskset: {id: ...}``; agents without a ``runtime`` run as processes beside us. The
        first ``num_tasks`` of the taskset (of one that is shuffled with that seed) are trained, the next ones held
        out."""
        self._config = _config(env)
        wanted = num_tasks + num_eval_tasks
        tasks = _load(self._config, wanted, shuffle)
        if len(tasks) < wanted:  # those held out are had first, so that there are some
            num_tasks = max(1, len(tasks) - num_eval_tasks)
        self._tasks: Sequence[Task[Any]] = tasks
        self.num_tasks, self.num_eval_tasks = min(num_tasks, len(tasks)), max(0, len(tasks) - num_tasks)

    def tasks(self, index: int) -> dict[str, JSON]:
        return _row(self._tasks[index])

    def eval_tasks(self, index: int) -> dict[str, JSON]:
        return _row(self._tasks[self.num_tasks + index])

    async def run(self, task: Mapping[str, JSON], llm: Llm, ctx: Context) -> dict[str, float]:
        from verifiers.v1.clients import EvalClientConfig, ModelContext
        from verifiers.v1.types import SamplingConfig
        from verifiers.v1.utils.loaders import load_environment

        _run_scripts_here()
        chosen = next(one for one in self._tasks if one.data.idx == task["idx"])
        environment = load_environment(self._config)
        with _key_in_a_variable(llm.api_key) as variable:
            client = EvalClientConfig(base_url=llm.base_url, api_key_var=variable)
            context = ModelContext(client=client, model=llm.model, sampling=SamplingConfig())
            async with environment.serving():
                stopping = partial(_stop_at_limits, policy_url=llm.base_url)
                episode = await environment.run_episode(chosen, context, on_trace=stopping)
        for trace in episode.traces:
            for name, value in trace.metrics.items():
                if value is not None:
                    ctx.metric(name, value)
        return _reward(episode, llm.base_url)


def _config(env: Mapping[str, JSON]) -> EnvConfig:
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.runtimes import SubprocessConfig
    from verifiers.v1.utils.loaders import resolve_env_config

    config = resolve_env_config(dict(env))
    if not config.taskset.id:
        raise InvalidEnvironment("env needs the taskset of verifiers that is played: {taskset: {id: NAME}}")
    here = {
        name: agent.model_copy(update={"runtime": SubprocessConfig()})
        for name, agent in agent_config_fields(config).items()
        if "runtime" not in agent.model_fields_set
    }
    return config.model_copy(update=here)


def _load(config: EnvConfig, wanted: int, shuffle: int | None) -> Sequence[Task[Any]]:
    from verifiers.v1.utils.loaders import load_taskset

    taskset = load_taskset(config.taskset)
    _let_children_import(type(taskset).__module__)
    if shuffle is not None:
        taskset = (taskset if taskset.bounded else taskset.take(wanted)).shuffle(shuffle)
    return list(islice(taskset, wanted))


def _let_children_import(module: str) -> None:
    """Tool servers are started by the name of their module, which may lie beside the file of the job's `ref`."""
    top = sys.modules[module.partition(".")[0]]
    file = Path(str(top.__file__)).resolve()
    folder = file.parent.parent if hasattr(top, "__path__") else file.parent
    known = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([str(folder), *known]))


def _row(task: Task[Any]) -> dict[str, JSON]:
    return {"idx": task.data.idx, "name": task.data.name or task.data.id or str(task.data.idx)}


def _stop_at_limits(trace: Trace, policy_url: str) -> None:
    """Where the gateway refuses a turn at a limit of the job, the trace is stopped as at a limit of verifiers: that is
    no failure of its harness, and what it did is scored. To verifiers alone it would be an error of the provider."""

    def look(trace: Trace) -> None:
        error = trace.calls[-1].error if trace.calls else None
        if error is not None and error.status_code == 400 and (limit := _LIMIT.search(error.message)):
            trace.stop(limit[1])

    if _asks(trace, policy_url):
        trace.watch(look)


def _asks(trace: Trace, policy_url: str) -> bool:
    client = trace.agent.config.client
    return client is not None and client.base_url == policy_url


def _reward(episode: Episode, policy_url: str) -> dict[str, float]:
    """The weighted rewards of those whom the policy plays. Raises what went wrong."""
    for trace in episode.traces:
        if not trace.agent.trainable and _asks(trace, policy_url):
            name = trace.agent.name
            raise RuntimeError(
                f"{name} is not to be trained, so it needs another model than the policy: env.{name}.client"
            )
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors if not trace.ok)]
    if errors:
        raise RuntimeError(f"{errors[-1].type}: {errors[-1].message}")
    played = [trace for trace in episode.traces if trace.agent.trainable]
    parts: dict[str, float] = {}
    for trace in played:
        prefix = f"{trace.agent.name}/" if len(played) > 1 else ""
        for name, reward in trace.rewards.items():
            if reward is None:
                raise RuntimeError(f"verifiers did not score {name}")
            parts[prefix + name] = parts.get(prefix + name, 0.0) + reward.value
    return parts


@contextmanager
def _key_in_a_variable(key: str) -> Iterator[str]:
    """Where verifiers reads a key. It hands no variable of such a name on to programs that it starts."""
    name = f"GSPO_API_KEY_{uuid.uuid4().hex}"
    os.environ[name] = key
    try:
        yield name
    finally:
        del os.environ[name]


def _run_scripts_here() -> None:
    """Has programs of harnesses run under this interpreter, where all that they declare is installed for it: verifiers
    would get each a virtual environment from a package index, by `uv`, while episodes are played."""
    from verifiers.v1.runtimes.subprocess import SubprocessRuntime

    with_uv = SubprocessRuntime.prepare_uv_script
    if getattr(with_uv, "runs_here", False):
        return

    async def prepare(
        self: Runtime, script: str | bytes, env: dict[str, str] | None = None, *, activate: bool = True
    ) -> list[str]:
        text = script if isinstance(script, str) else script.decode()
        if not all(_is_installed(requirement) for requirement in _requirements(text)):
            argv: list[str] = await with_uv(self, script, env, activate=activate)
            return argv
        name = f".program-{hashlib.sha256(text.encode()).hexdigest()[:16]}.py"
        await self.write(name, text.encode())
        return [sys.executable, str(Path(self.workdir) / name)]

    prepare.runs_here = True  # type: ignore[attr-defined]
    SubprocessRuntime.prepare_uv_script = prepare


def _requirements(script: str) -> list[str]:
    block = _SCRIPT.search(script)
    if block is None:
        return []
    text = "\n".join(line[2:] for line in block["lines"].splitlines())
    return [str(one) for one in tomllib.loads(text).get("dependencies", [])]


def _is_installed(requirement: str) -> bool:
    from packaging.requirements import Requirement

    wanted = Requirement(requirement)
    try:
        is_met: bool = wanted.specifier.contains(metadata.version(wanted.name), prereleases=True)
    except metadata.PackageNotFoundError:
        return False
    return is_met
