"""Tasks in the format of Harbor (and so of Terminal-Bench 2): one tool, ``bash``, in a sandbox of the episode's own.

Rule: no image is built. A task's files are laid out as its Dockerfile copies them, and what it asks for beyond that
is refused by its name, unless the configuration says that the machine provides it. Tests come into an episode only when
it is judged, and commands see none of them before; they judge whatever stands there when the policy has finished, its
commands have used up their time, or a limit has ended the episode.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from environments.harbor import places as at
from environments.harbor.places import Places
from environments.harbor.reward import MOST_BYTES, read
from environments.harbor.task import Budgets, HarborTask, find_tasks, read_task
from environments.sandbox import door
from environments.sandbox.command import GRACE_S, shown_to_all
from environments.sandbox.contract import Command, Ended, File, Sandbox, Sandboxes, SandboxFailed, archive
from gspo_core.env import Context, InvalidEnvironment
from gspo_core.json_value import JSON

# What our own deadlines leave to the phases around them, so that ours is the one that is met.
SLACK_S = 15.0
_MOST_COMMAND_CHARS = 60_000
_MOST_STATE_BYTES = 4 << 20
_VERIFIER = f"{at.LOGS}/verifier"


@dataclass(frozen=True)
class _Settings:
    """What all episodes of one configuration share."""

    tasks: Mapping[str, HarborTask]
    sandboxes: Sandboxes
    command_timeout_s: float
    most_output_bytes: int


def harbor(
    path: str,
    *,
    tasks: Sequence[str] = (),
    eval_tasks: Sequence[str] = (),
    provided: Sequence[str] = (),
    readable: Sequence[str] = (),
    command_timeout_s: float = 60.0,
    boot_timeout_s: float = 0.0,
    run_timeout_s: float = 0.0,
    score_timeout_s: float = 0.0,
    most_output_bytes: int = 10_000,
    reward_range: tuple[float, float] | list[float] = (0.0, 1.0),
) -> _Episode:
    """An instance for one episode. ``path`` is a folder of tasks, or one; ``tasks`` are all but ``eval_tasks``.

    ``provided`` names what tasks ask for and this machine has: ``[FROM, RUN, environment.memory_mb]``. ``readable``
    are folders that commands may read beside the system. A budget of 0 is that of the task. The low end of
    ``reward_range`` is also what a state is worth from which the tests come to no reward."""
    if min(command_timeout_s, most_output_bytes) <= 0 or min(boot_timeout_s, run_timeout_s, score_timeout_s) < 0:
        raise InvalidEnvironment("timeouts and most_output_bytes are positive; 0 leaves a budget to its task")
    budgets = Budgets(boot_timeout_s, run_timeout_s, score_timeout_s)
    settings, cls = _made(
        path, tuple(tasks), tuple(eval_tasks), tuple(provided), tuple(readable), command_timeout_s, budgets,
        most_output_bytes, tuple(reward_range),
    )  # fmt: skip
    return cls(settings, budgets)


@cache
def _made(
    path: str,
    tasks: tuple[str, ...],
    eval_tasks: tuple[str, ...],
    provided: tuple[str, ...],
    readable: tuple[str, ...],
    command_timeout_s: float,
    budgets: Budgets,
    most_output_bytes: int,
    reward_range: tuple[float, ...],
) -> tuple[_Settings, type[_Episode]]:
    sandboxes = door.sandboxes(readable)
    if why := sandboxes.refusal():
        raise InvalidEnvironment(f"tasks of Harbor run no commands here: {why}")
    folders = {one.resolve().name: one for one in find_tasks(path)}
    unknown = sorted({*tasks, *eval_tasks} - folders.keys())
    if unknown:
        raise InvalidEnvironment(f"{path} has no task {unknown[0]}; it has {', '.join(folders)}")
    if not door.is_open():
        _check_hidden(Path(path), readable)
    trained = tasks or tuple(name for name in folders if name not in eval_tasks)
    found = {name: read_task(folders[name], provided, door.is_open()) for name in (*trained, *eval_tasks)}
    settings = _Settings(found, sandboxes, command_timeout_s, most_output_bytes)
    cls = _make_class(settings, trained, eval_tasks, budgets)
    cls.reward_range = reward_range
    return settings, cls


def _make_class(
    settings: _Settings, trained: Sequence[str], held_out: Sequence[str], budgets: Budgets
) -> type[_Episode]:
    longest = [_budgets(task, budgets) for task in settings.tasks.values()]

    class Harbor(_Episode):
        """Do the task with bash. Every command begins in the same folder, and ends with all that it has started. When
        the task is done, answer without a call."""

        tasks = tuple({"task": name} for name in trained)
        eval_tasks = tuple({"task": name} for name in held_out)
        limits: Mapping[str, JSON] = {
            "reset_timeout_s": max(one.boot_s for one in longest) + SLACK_S,
            "step_timeout_s": settings.command_timeout_s + SLACK_S,
            "score_timeout_s": max(one.score_s for one in longest) + SLACK_S,
        }

    if all(task.has_solution for task in settings.tasks.values()):
        Harbor.oracle = staticmethod(lambda task: _solved(settings.tasks[task]))  # type: ignore[attr-defined]
    return Harbor


def _budgets(task: HarborTask, given: Budgets) -> Budgets:
    own = task.budgets
    return Budgets(given.boot_s or own.boot_s, given.run_s or own.run_s, given.score_s or own.score_s)


def _check_hidden(tasks: Path, readable: Sequence[str]) -> None:
    for shown in (*shown_to_all(), *readable):
        given = Path(shown).resolve()
        if tasks.resolve().is_relative_to(given) or given.is_relative_to(tasks.resolve()):
            raise InvalidEnvironment(f"commands may read {shown}, and so the tests and solutions in {tasks}")


def _solved(task: HarborTask) -> list[tuple[str, dict[str, str]] | str]:
    """What a policy would do that has the solution: writes it to its place and runs it."""
    lines = [f"export {name}={_quoted(value)}" for name, value in task.solution_variables.items()]
    solution = task.folder / "solution"
    for path in sorted(one for one in solution.rglob("*") if one.is_file()):
        target = _quoted(f"{at.SOLUTION}/{path.relative_to(solution)}")
        lines += [f'mkdir -p "$(dirname {target})"', _written(path.read_bytes(), target, f"END-{task.digest[:16]}")]
    return [("bash", {"command": "\n".join([*lines, f"bash {at.SOLUTION}/solve.sh"])}), "Done."]


def _written(data: bytes, target: str, end: str) -> str:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return f"base64 -d > {target} <<'{end}'\n{base64.b64encode(data).decode()}\n{end}"
    return f"cat > {target} <<'{end}'\n{text.rstrip(chr(10))}\n{end}"  # as a text its paths are replaced


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


class _Episode:
    """One task in one sandbox."""

    runs_in_sandboxes = True
    hosting = {"sessions_per_process": 1}  # noqa: RUF012 - never changed
    end_state = ("task", "used_s", "done")
    reward_range: tuple[float, ...] = (0.0, 1.0)

    def __init__(self, settings: _Settings, budgets: Budgets) -> None:
        self._settings = settings
        self._given = budgets
        self._sandbox: Sandbox | None = None
        self._failure: SandboxFailed | None = None
        self.task = ""
        self.used_s = 0.0
        """Spent from the budget for commands."""
        self.done = False

    def reset(self, task: str) -> str:
        deadline = time.monotonic() + _budgets(self._settings.tasks[task], self._given).boot_s
        self._begin(task)
        places = self._places
        new = [File(folder) for folder in (*places.new, str(places.real(f"{at.LOGS}/agent")))]
        laid = [file for copy in self._task.copies for file in self._laid_out(copy.source, copy.target, deadline)]
        self._put([*new, *laid])
        # What cannot run one command would answer every command of the policy with our own failure.
        probe = self._run("true", max(1.0, deadline - time.monotonic()))
        if probe.status != 0:
            raise SandboxFailed(f"bash ended with status {probe.status}: {probe.output}")
        return self._task.instruction

    def bash(self, command: str, ctx: Context) -> str:
        """Run a command in bash. Its output is shown, and its status unless that is 0.

        Args:
            command: one or more lines
        """
        if len(command) > _MOST_COMMAND_CHARS:
            raise ValueError(f"at most {_MOST_COMMAND_CHARS} characters")
        left_s = self._budgets.run_s - self.used_s
        if self.done or left_s <= 0:
            raise ValueError("the time for this task is over")
        timeout_s = min(self._settings.command_timeout_s, left_s, _within(ctx))
        try:
            ended = self._run(self._places.inward(command), timeout_s)
        except SandboxFailed as failure:  # not the policy's fault: the episode gets no reward
            self._failure, self.done = failure, True
            return "the machine failed"
        self.used_s += ended.seconds
        self.done = self.used_s >= self._budgets.run_s
        ctx.metric("command_s", self.used_s)
        return self._answer(ended, timeout_s)

    def get_reward(self, ctx: Context) -> float:
        if self._failure is not None:
            raise self._failure
        timeout_s = min(self._budgets.score_s, _within(ctx))
        deadline = time.monotonic() + timeout_s
        tests, judged = str(self._places.real(at.TESTS)), str(self._places.real(_VERIFIER))
        laid = self._laid_out(self._task.folder / "tests", at.TESTS, deadline)
        self._put([File(tests), *laid, File(judged)], [tests, judged])  # whatever the policy has put there
        left_s = max(1.0, deadline - time.monotonic())
        ended = self._run(f"bash {tests}/test.sh", left_s, self._task.verifier_variables)
        found = read(lambda name: self._held.get(f"{judged}/{name}", MOST_BYTES))
        ctx.metric("verifier_s", ended.seconds)
        ctx.metric("verifier_timed_out", float(ended.timed_out))
        ctx.metric("verifier_wrote_nothing", float(found is None))
        if found is None:  # the tests do write one for other states, so it is this state that keeps them from it
            ctx.log("the tests wrote no reward", output=ended.output)
            return self.reward_range[0]
        for name, value in found.others.items():
            ctx.metric(f"verifier/{name}", value)
        return found.reward

    def snapshot(self) -> bytes | None:
        """None where the folder is too large for one, or holds sockets and the like: then the episode has no way
        back to this turn."""
        state = None if self._failure else self._held.snapshot(self._places.kept, _MOST_STATE_BYTES)
        if state is None:
            return None
        about = {"task": self.task, "digest": self._task.digest, "used_s": self.used_s, "done": self.done}
        return json.dumps(about).encode() + b"\n" + state

    def restore(self, state: bytes) -> None:
        head, _, held = state.partition(b"\n")
        about = json.loads(head)
        self._begin(about["task"])
        if about["digest"] != self._task.digest:
            raise ValueError(f"the snapshot is of another version of task {self.task}")
        self._held.restore(held)
        self.used_s, self.done = about["used_s"], about["done"]

    def close(self) -> None:
        if self._sandbox is not None:
            self._sandbox.close()

    @property
    def _held(self) -> Sandbox:
        assert self._sandbox is not None
        return self._sandbox

    @property
    def _places(self) -> Places:
        return Places(Path(self._held.root), self._task.workdir)

    @property
    def _task(self) -> HarborTask:
        return self._settings.tasks[self.task]

    @property
    def _budgets(self) -> Budgets:
        return _budgets(self._task, self._given)

    def _begin(self, task: str) -> None:
        self.task = task
        self._sandbox = self._settings.sandboxes.create(self._task.image)

    def _laid_out(self, source: Path, target: str, deadline: float) -> list[File]:
        """A file, or what is in a folder. Raises ``TimeoutError``."""
        laid = []
        for path in [source] if source.is_file() else sorted(source.rglob("*")):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the files of task {self.task} could not be laid out in time")
            into = self._places.real(target if source.is_file() else f"{target}/{path.relative_to(source)}")
            laid.append(self._places.laid_out(path, into))
        return laid

    def _put(self, files: Sequence[File], instead_of: Sequence[str] = ()) -> None:
        """What is named by its real path lies below the root."""
        root = Path(self._held.root)
        relative = [replace(one, path=str(root.joinpath(one.path).relative_to(root))) for one in files]
        self._held.put(archive(relative), instead_of)

    def _run(self, command: str, timeout_s: float, more: Mapping[str, str] | None = None) -> Ended:
        places = self._places
        given = {name: places.inward(value) for name, value in {**self._task.variables, **(more or {})}.items()}
        return self._held.run(
            Command(
                command,
                directory=str(places.real(self._task.workdir)),
                home=str(places.real(at.HOME)),
                scratch=str(places.real(at.TMP)),
                variables=given,
                timeout_s=timeout_s,
                most_bytes=self._settings.most_output_bytes,
            )
        )

    def _answer(self, ended: Ended, timeout_s: float) -> str:
        said = [self._places.outward(ended.output).rstrip("\n")] if ended.output.strip() else []
        if ended.timed_out:
            said.append(f"error: the command was ended after {timeout_s:.3g}s")
        elif ended.status:
            said.append(f"(status {ended.status})")
        if self.done:
            said.append("The time for this task is over.")
        return "\n".join(said) or "(no output)"


def _within(ctx: Context) -> float:
    """Ahead of the deadline of the phase, which would take the session with it."""
    return max(1.0, ctx.deadline_s - GRACE_S)
