"""What can be seen of an agent before a policy answers it.

Rule: no agent is started here, for it would ask a policy that is not there; what cannot be seen is said, not passed.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import PurePath
from urllib.parse import urlsplit

from gspo_core.env import AgentEnvironment, EnvironmentFailed
from gspo_core.env.agent_runs import AgentFailed, variables_for
from gspo_core.environment_contract import Llm
from gspo_core.json_value import JSON
from gspo_core.testing.report import Check, Status
from gspo_core.types import Split

MAX_LOOKED_AT = 500
# Each runs the file that is its first argument.
INTERPRETER = re.compile(r"python[\d.]*|node|deno|bun|bash|sh|ruby|perl")
# For a judge's prompt, which may hold a long task.
MAX_SHOWN_CHARS = 4096


async def examine_agent(environment: AgentEnvironment) -> AsyncIterator[Check]:
    yield _start(environment)
    yield await _tasks(environment)
    yield (
        _reward(environment) if environment.start.judge is None else await _judge(environment, environment.start.judge)
    )
    yield Check(
        "episodes", Status.SKIP, "an agent is played by no rehearsal: a job's first step shows whether its episodes end"
    )


def _start(environment: AgentEnvironment) -> Check:
    start = environment.start
    if start.url is not None:
        return Check("start", Status.SKIP, "the service is not called here: it would play an episode")
    if start.pull:
        return Check("start", Status.SKIP, "nothing is started: agents fetch their episodes")
    if start.command is None:
        return Check("start", Status.PASS, "a function, which runs in a process apart")
    program = start.command[0]
    found = shutil.which(program) or shutil.which(program, path=str(environment.folder))
    if found is None and not (environment.folder / program).is_file():
        return Check("start", Status.FAIL, f"there is no program {program} on the PATH nor in {environment.folder}")
    script = _script(start.command)
    if script and not (environment.folder / script).is_file():
        return Check("start", Status.FAIL, f"{program} is there, but no file {script} in {environment.folder}")
    spoken = "" if start.acp is None else " and is spoken to by the Agent Client Protocol"
    return Check("start", Status.PASS, f"{program} is there; it runs in {environment.folder}{spoken}")


def _script(command: Sequence[str]) -> str:
    """What an interpreter is told to run, where that is a file for certain; else empty."""
    is_run = len(command) > 1 and INTERPRETER.fullmatch(PurePath(command[0]).name) and "." in command[1]
    return command[1] if is_run and not command[1].startswith("-") else ""


async def _tasks(environment: AgentEnvironment) -> Check:
    counts = {str(split): environment.num_tasks(split) for split in Split}
    seen: dict[Split, set[str]] = {}
    for split in Split:
        seen[split] = set()
        for index in range(min(environment.num_tasks(split), MAX_LOOKED_AT)):
            try:
                task = await environment.task(split, index)
                if not environment.start.is_function:
                    variables_for(task, Llm("", ""))
                if environment.start.acp is not None:
                    environment.start.acp.prompts_for(task)
            except EnvironmentFailed as failure:
                return Check("tasks", Status.FAIL, failure.reason)
            except AgentFailed as error:
                return Check("tasks", Status.FAIL, f"task {index} ({split}) cannot be handed over: {error}")
            seen[split].add(json.dumps(task, sort_keys=True, default=repr))
    shared = seen[Split.TRAIN] & seen[Split.EVAL]
    if shared:
        return Check("tasks", Status.WARN, f"{len(shared)} held-out tasks are also training tasks", counts)
    if not counts["eval"]:
        return Check("tasks", Status.WARN, f"{counts['train']} tasks, none held out: nothing can be measured", counts)
    return Check("tasks", Status.PASS, f"{counts['train']} to train, {counts['eval']} held out", counts)


async def _judge(environment: AgentEnvironment, given: Mapping[str, JSON]) -> Check:
    """Its prompt is made for the first task and shown; it is not asked, for it would have nothing to judge."""
    from pydantic import ValidationError

    from gspo_core.judge_spec import JudgeSpec
    from gspo_core.placeholders import NoSuchField

    try:
        judge = JudgeSpec.model_validate(dict(given))
        task = json.loads(json.dumps(dict(await environment.task(Split.TRAIN, 0)))) if judge.asks_for_task else {}
        prompt = judge.ask(lambda: "{{conversation}}", "{{answer}}", task)
    except ValidationError as error:
        first = error.errors()[0]
        return Check("reward", Status.FAIL, f"agent.judge.{'.'.join(map(str, first['loc']))}: {first['msg']}")
    except (NoSuchField, TypeError, ValueError) as error:
        return Check("reward", Status.FAIL, f"agent.judge.prompt: {error}")
    where = urlsplit(judge.url).hostname
    shown = f"by {judge.model} of {where}, which is not asked here; its prompt for the first task:\n{_indented(prompt)}"
    return Check("reward", Status.PASS, shown)


def _indented(text: str) -> str:
    shown = text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]} [... {len(text):,} characters in all]"
    return "\n".join(f"    {line}" for line in shown.splitlines())


def _reward(environment: AgentEnvironment) -> Check:
    if environment.has_judge:
        return Check("reward", Status.PASS, f"by {environment.start.reward or 'get_reward'}")
    if environment.start.command is not None:
        return Check("reward", Status.WARN, "there is no get_reward, so the program has to post its reward")
    if environment.start.pull:
        return Check("reward", Status.SKIP, "there is no get_reward, so the agent has to tell its reward at the end")
    what = "return" if environment.start.is_function else "answer with, or post,"
    return Check("reward", Status.SKIP, f"there is no get_reward, so the agent has to {what} its reward")
