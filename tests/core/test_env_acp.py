"""Programs that speak the Agent Client Protocol: asked, answered, confined, cancelled, and named where they fail."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gspo_core.env import AgentStart, EnvironmentFailed, Timeouts, acp_client, acp_messages
from gspo_core.env.acp_run import AcpStart
from gspo_core.spec import AgentSpec
from gspo_core.testing import validate
from tests.core.acp_kit import LLM, acp_environment, played, played_session
from tests.patience import HANG_S

SAYS_ALL = "def prompt(text):\n    say(json.dumps({message['method']: message.get('params') for message in HEARD}))"


# --- what it is told and asked


async def test_a_session_is_begun_in_a_folder_of_the_episodes_own(tmp_path: Path) -> None:
    said, _ = await played(
        acp_environment(tmp_path, SAYS_ALL.replace("say(", "say(os.environ['GSPO_FOLDER'] + ' ' + "))
    )
    folder, _, told = said.partition(" ")
    heard = json.loads(told)
    assert heard["initialize"] == {
        "protocolVersion": 1,
        "clientCapabilities": {"fs": {"readTextFile": True, "writeTextFile": True}, "terminal": False},
    }
    assert heard["session/new"] == {"cwd": folder, "mcpServers": []}
    assert heard["session/prompt"] == {"sessionId": "one", "prompt": [{"type": "text", "text": "Go."}]}
    assert "authenticate" not in heard
    assert not os.path.exists(folder)  # noqa: ASYNC240


async def test_it_is_started_like_other_programs(tmp_path: Path) -> None:
    body = """
def prompt(text):
    names = ("OPENAI_BASE_URL", "ANTHROPIC_BASE_URL", "GOOGLE_GEMINI_BASE_URL", "GSPO_TASK")
    keys = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY")
    assert [os.environ[name] for name in keys] == ["ep_" + "secret"] * 3
    assert os.path.isdir(os.environ["TMPDIR"]) and os.environ["TMPDIR"] != os.environ["GSPO_FOLDER"]
    say(" ".join([os.getcwd(), *(os.environ[name] for name in names)]))
"""
    said, _ = await played(acp_environment(tmp_path, body))
    urls = "http://127.0.0.1:1/v1 http://127.0.0.1:1 http://127.0.0.1:1"
    assert said == f'{tmp_path} {urls} {{"prompt": "Go."}}'


@pytest.mark.parametrize(
    ("task", "template", "asked"),
    [
        ({"prompt": "Do it.", "answer": 4}, None, ["Do it."]),
        ({"question": "What?", "answer": 4}, None, ["What?"]),
        ({"prompts": ["First.", "Then."], "prompt": "no"}, None, ["First.", "Then."]),
        ({"prompts": ["First.", 2], "size": 3}, None, ['{"prompts": ["First.", 2], "size": 3}']),
        ({"size": 3, "what": "ü"}, None, ['{"size": 3, "what": "ü"}']),
        ({"a": {"b": 1}, "prompt": "{{task.a}}"}, "{{task.prompt}} {{ task.a.b }}!", ["{{task.a}} 1!"]),
    ],
)
def test_the_task_decides_what_it_is_asked(task: dict[str, Any], template: str | None, asked: list[str]) -> None:
    assert AcpStart(prompt=template).prompts_for(task) == asked


async def test_several_prompts_are_asked_one_after_another_in_one_session(tmp_path: Path) -> None:
    said, _ = await played(acp_environment(tmp_path, "", task={"prompts": ["First.", "Then."]}))
    assert said == "First.\nThen."


async def test_a_prompt_that_ended_otherwise_is_the_last_one_and_no_failure(tmp_path: Path) -> None:
    body = "def prompt(text):\n    say(text)\n    return 'max_turn_requests'"
    said, _ = await played(acp_environment(tmp_path, body, task={"prompts": ["First.", "Then."]}))
    assert said == "First."


async def test_what_it_tells_its_user_is_its_result_and_nothing_else(tmp_path: Path) -> None:
    body = """
def prompt(text):
    say("thought", kind="agent_thought_chunk")
    say("user", kind="user_message_chunk")
    image = {"sessionUpdate": "agent_message_chunk", "content": {"type": "image"}}
    send(method="session/update", params={"update": image})
    send(method="session/update", params={"update": "nonsense"})
    send(method="session/update", params=[1])
    send(method="_vendor/telemetry", params={})
    write("\\n")
    for piece in ("Größe ", "\\ud83e\\udd8a", " \\ud800."):
        say(piece)
"""
    said, _ = await played(acp_environment(tmp_path, body))
    assert said == "Größe 🦊 ?."


async def test_the_end_is_kept_of_what_it_says_at_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acp_client, "MAX_SAID_CHARS", 10)
    said, _ = await played(acp_environment(tmp_path, "def prompt(text):\n    for n in range(100): say(f'{n:03d}')"))
    assert said == "6097098099"


# --- what it may ask


OPTIONS = [
    {"optionId": "n1", "kind": "reject_once", "name": ""},
    {"optionId": "ya", "kind": "allow_always", "name": ""},
    {"optionId": "y1", "kind": "allow_once", "name": ""},
    {"optionId": "na", "kind": "reject_always", "name": ""},
]


@pytest.mark.parametrize(
    ("permissions", "options", "outcome"),
    [
        ("allow", OPTIONS, {"outcome": "selected", "optionId": "y1"}),
        ("allow", OPTIONS[:2], {"outcome": "selected", "optionId": "ya"}),
        ("allow", [{"optionId": "odd", "kind": "sometimes"}, *OPTIONS[:1]], {"outcome": "selected", "optionId": "odd"}),
        ("allow", [], {"outcome": "cancelled"}),
        ("reject", OPTIONS, {"outcome": "selected", "optionId": "n1"}),
        ("reject", OPTIONS[1:], {"outcome": "selected", "optionId": "na"}),
        ("reject", OPTIONS[1:3], {"outcome": "cancelled"}),
        ("allow", None, {"outcome": "cancelled"}),
    ],
)
async def test_the_job_decides_what_it_is_permitted(
    tmp_path: Path, permissions: Any, options: Any, outcome: Any
) -> None:
    body = f"def prompt(text):\n    say(json.dumps(ask('session/request_permission', options={options!r})['outcome']))"
    said, _ = await played(acp_environment(tmp_path, body, AcpStart(permissions=permissions)))
    assert json.loads(said) == outcome


async def test_files_are_read_and_written_in_its_folder(tmp_path: Path) -> None:
    body = """
def prompt(text):
    here = os.environ["GSPO_FOLDER"]
    ask("fs/write_text_file", path=here + "/deep/er/1", content="the old text is longer")
    assert ask("fs/write_text_file", path=here + "/deep/er/1", content="7") == {}
    pathlib.Path(here, "lines").write_text("1\\n2\\x0b\\n3\\n4\\n")
    os.symlink(here + "/lines", here + "/link")
    say(json.dumps([ask("fs/read_text_file", path=here + name, **more)["content"] for name, more in (
        ("/link", {}), ("/lines", {"line": 2, "limit": 2}), ("/deep/../lines", {"line": 4}), ("/lines", {"limit": 1}),
    )]))
    os.remove(here + "/lines")
    os.remove(here + "/link")
"""
    said, left = await played(acp_environment(tmp_path, body))
    assert json.loads(said) == ["1\n2\x0b\n3\n4\n", "2\x0b\n3\n", "4\n", "1\n"]
    assert left == {"1": 7.0}


@pytest.mark.parametrize(
    ("path", "code", "words"),
    [
        ("'/etc/passwd'", -32602, "/etc/passwd is not in the session's folder"),
        ("here + '/../' + os.path.basename(here) + 'x'", -32602, "is not in the session's folder"),
        ("here + '/out/secret'", -32602, "is not in the session's folder"),
        ("here + '/leaf'", -32602, "is not in the session's folder"),
        ("here + 'x'", -32602, "is not in the session's folder"),
        ("'agent.py'", -32602, "not an absolute path"),
        ("None", -32602, "not an absolute path"),
        ("here + chr(0)", -32602, "path: "),
        ("here + '/circle'", None, ""),
        ("here + '/a' * 1_900", None, ""),
        ("here + '/pipe'", -32602, "is no regular file"),
        ("here", None, ""),
    ],
)
@pytest.mark.parametrize("method", ["fs/read_text_file", "fs/write_text_file"])
async def test_what_leads_out_of_its_folder_is_refused(
    tmp_path: Path, path: str, code: int | None, words: str, method: str
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("5")
    body = f"""
def prompt(text):
    here = os.environ["GSPO_FOLDER"]
    os.symlink({str(outside)!r}, here + "/out")
    os.symlink({str(outside / "secret")!r}, here + "/leaf")
    os.symlink("circle", here + "/circle")
    os.mkfifo(here + "/pipe")
    say(json.dumps(ask({method!r}, path={path}, content="9")))
    for name in ("out", "leaf", "circle", "pipe"):
        os.remove(here + "/" + name)
    assert not os.listdir(here)
"""
    said, left = await played(acp_environment(tmp_path, body))
    error = json.loads(said)
    if words or code:
        # A pipe that nobody reads cannot be opened for writing, which is an error of its own.
        is_full = path.endswith("/pipe'") and method == "fs/write_text_file"
        assert error["code"] == (-32603 if is_full else code)
        assert is_full or words in error["message"]
    assert error["code"] < 0
    assert (outside / "secret").read_text() == "5"
    assert left == {}


@pytest.mark.parametrize("method", ["fs/read_text_file", "fs/write_text_file"])
def test_a_link_that_is_put_on_the_way_meanwhile_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """A program that swaps a folder for a link, again and again, met the moment behind the look before."""
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    outside.mkdir()
    (outside / "secret").write_text("5")
    (folder / "in").mkdir(parents=True)
    client = acp_client.EpisodeClient(folder, "allow")
    look = client._place

    def swapped(params: Any) -> Path:
        found = look(params)
        (folder / "in").rmdir()
        (folder / "in").symlink_to(outside)
        return found

    monkeypatch.setattr(client, "_place", swapped)
    with pytest.raises(acp_messages.RpcError):
        client.answer(method, {"path": f"{folder}/in/secret", "content": "9"})
    assert (outside / "secret").read_text() == "5"


async def test_other_files_that_cannot_be_read_are_refused_by_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acp_client, "MAX_FILE_BYTES", 4)
    body = """
def prompt(text):
    here = pathlib.Path(os.environ["GSPO_FOLDER"])
    (here / "long").write_bytes(b"12345")
    (here / "bytes").write_bytes(b"\\xff")
    say(json.dumps([ask("fs/read_text_file", path=f"{here}/{name}") for name in ("absent", "long", "bytes")]))
    (here / "long").unlink()
    (here / "bytes").unlink()
"""
    said, _ = await played(acp_environment(tmp_path, body))
    absent, long, binary = json.loads(said)
    assert absent["code"] == -32002
    assert "has more than 4 bytes" in long["message"]
    assert "is no text in UTF-8" in binary["message"]


@pytest.mark.parametrize("method", ["terminal/create", "_vendor/ask", "session/update"])
async def test_a_method_that_was_not_offered_is_answered_as_unknown(tmp_path: Path, method: str) -> None:
    said, _ = await played(acp_environment(tmp_path, f"def prompt(text):\n    say(json.dumps(ask({method!r})))"))
    assert json.loads(said) == {"code": -32601, "message": f"there is no {method} here"}


async def test_a_program_that_reads_late_is_not_waited_for_by_what_it_has_written(tmp_path: Path) -> None:
    """Both pipes are full long before either side has read all."""
    body = """
def prompt(text):
    here = os.environ["GSPO_FOLDER"]
    pathlib.Path(here, "1").write_text(" " * 100_000 + "1")
    for number in range(50):
        send(id=f"early-{number}", method="fs/read_text_file", params={"path": here + "/1"})
        say("x" * 10_000, kind="agent_thought_chunk")
    say(str(sum(len(read()["result"]["content"]) for number in range(50))))
"""
    said, _ = await played(acp_environment(tmp_path, body))
    assert said == "5000050"


# --- what goes wrong


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "sys.stderr.write('no such model'); sys.exit(3)",
            "ended with exit status 3 before it answered initialize: no such model",
        ),
        (
            "def session_new(params):\n    os.kill(os.getpid(), 9)",
            "ended with signal 9 before it answered session/new: no output",
        ),
        ("def prompt(text):\n    sys.exit(0)", "ended with exit status 0 before it answered session/prompt"),
        (
            "print('Loaded credentials.')",
            "wrote a line that is no message of the Agent Client Protocol: Loaded credentials.",
        ),
        ("print('[1]')", "wrote a line that is no message of the Agent Client Protocol: [1]"),
        ("print('[' * 100_000)", "wrote a line that is no message"),
        ("write('no line')\nsys.exit(0)", "wrote a line that is no message of the Agent Client Protocol: no line"),
        ("def initialize(params):\n    return {'protocolVersion': 2}", "speaks version 2 of the protocol, not 1"),
        ("def initialize(params):\n    return {'protocolVersion': 'v' * 999}", f"speaks version {'v' * 100} of the"),
        ("def prompt(text):\n    refuse(-1, chr(0xD800))", "with an error: ? (-1)"),
        ("def initialize(params):\n    return None", "speaks version None of the protocol, not 1"),
        ("def session_new(params):\n    return {}", "wrote an answer to session/new without a sessionId"),
        ("def session_prompt(params):\n    return {}", "wrote an answer to session/prompt without a stopReason"),
        (
            "def prompt(text):\n    refuse(-32603, 'Internal error', {'details': 'key ep_secret'})",
            'answered session/prompt with an error: Internal error: {"details": "key (key)"} (-32603)',
        ),
        (
            "def prompt(text):\n    send(id=None, error={'code': -32700, 'message': 'Parse error'})",
            "Parse error (-32700)",
        ),
        (
            "def prompt(text):\n    sys.stderr.write('no such key: ep_secret'); refuse(-32603, 'Internal error')",
            "Internal error (-32603); its stderr ends with: no such key: (key)",
        ),
        (
            "def session_new(params):\n    refuse(-32000, 'Authentication required')",
            "session/new with an error: Authentication required (-32000). It wants a login; agent.acp.login names one "
            "of its methods (by-key)",
        ),
    ],
)
async def test_what_goes_wrong_is_a_failure_of_the_agent_by_name(tmp_path: Path, body: str, words: str) -> None:
    with pytest.raises(EnvironmentFailed) as failed:
        await played(acp_environment(tmp_path, body))
    assert failed.value.phase == "agent"
    assert words in failed.value.reason
    assert failed.value.reason.startswith(sys.executable)
    assert "ep_secret" not in failed.value.reason


async def test_a_login_is_named_where_the_job_has_one(tmp_path: Path) -> None:
    body = SAYS_ALL + "\n\ndef session_new(params):\n    return {'sessionId': HEARD[-2]['params']['methodId']}"
    said, _ = await played(acp_environment(tmp_path, body, AcpStart(login="by-key")))
    assert json.loads(said)["session/prompt"]["sessionId"] == "by-key"


async def test_what_it_writes_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acp_messages, "MAX_MESSAGES", 5)
    environment = acp_environment(tmp_path, "def prompt(text):\n    for n in range(4): say(text)")
    with pytest.raises(EnvironmentFailed, match="wrote more than 5 messages"):
        await played(environment)
    environment = acp_environment(tmp_path, "def prompt(text):\n    for n in range(6): write('\\n')")
    with pytest.raises(EnvironmentFailed, match="wrote more than 5 messages"):
        await played(environment)
    environment = acp_environment(tmp_path, "def prompt(text):\n    say('x' * (17 << 20))")
    with pytest.raises(EnvironmentFailed, match="wrote a line of more than 16777216 bytes"):
        await played(environment)


async def test_a_program_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    session = acp_environment(tmp_path, "def initialize(params):\n    time.sleep(1000)").session(
        limits=Timeouts(reset_timeout_s=0.5, close_timeout_s=1)
    )
    session.offer(LLM)
    await session.start({"prompt": "Go."}, 0)
    with pytest.raises(EnvironmentFailed, match=r"did not answer initialize within 0\.5s") as failed:
        await session.ended()
    await session.close()
    assert (failed.value.phase, session.close_failure) == ("agent", None)


async def test_a_program_that_cannot_be_started_is_a_failure(tmp_path: Path) -> None:
    environment = acp_environment(tmp_path, "")
    environment.start = AgentStart(command=["/no/such/program"], acp=AcpStart())
    with pytest.raises(EnvironmentFailed, match="/no/such/program cannot be started"):
        await played(environment)


# --- its end


def has_line(path: Path) -> bool:
    return path.exists() and path.read_text().endswith("\n")


async def cancelled(environment: Any, mark: Path, close_timeout_s: float = HANG_S) -> Any:
    """Closed once ``mark`` has been written, in the middle of a prompt."""
    session = environment.session(limits=Timeouts(close_timeout_s=close_timeout_s))
    session.offer(LLM)
    await session.start({"prompt": "Go."}, 0)
    async with asyncio.timeout(HANG_S):
        while not has_line(mark):
            await asyncio.sleep(0.01)
    await session.close()
    return session


async def test_a_prompt_is_cancelled_in_words_when_its_session_closes(tmp_path: Path) -> None:
    mark, heard = tmp_path / "mark", tmp_path / "heard"
    body = f"""
def prompt(text):
    pathlib.Path({str(mark)!r}).write_text("\\n")
    assert read()["method"] == "session/cancel"
    outcome = ask("session/request_permission", options={OPTIONS!r})["outcome"]
    pathlib.Path({str(heard)!r}).write_text(json.dumps([HEARD[-2]["params"], outcome]) + "\\n")
    return "cancelled"
"""
    session = await cancelled(acp_environment(tmp_path, body), mark)
    assert (session.close_failure, session.is_stuck) == (None, False)
    assert heard.read_text() == '[{"sessionId": "one"}, {"outcome": "cancelled"}]\n'


async def test_a_program_that_hears_nothing_is_killed(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    body = f"""
def prompt(text):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pathlib.Path({str(mark)!r}).write_text(f"{{os.getpid()}}\\n")
    while True:
        time.sleep(1)
"""
    session = await cancelled(acp_environment(tmp_path, body), mark, close_timeout_s=5)
    assert (session.close_failure, session.is_stuck) == (None, False)
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)


async def test_a_program_that_stays_after_its_last_answer_is_ended(tmp_path: Path) -> None:
    """Also where a child of it holds its stdout."""
    mark = tmp_path / "mark"
    body = f"""
def session_prompt(params):
    import subprocess
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    pathlib.Path({str(mark)!r}).write_text(f"{{os.getpid()}} {{child.pid}}\\n")
    say("done")
    send(id=HEARD[-1]["id"], result={{"stopReason": "end_turn"}})
    time.sleep(1000)
"""
    session = acp_environment(tmp_path, body).session(limits=Timeouts(close_timeout_s=1))
    session.offer(LLM)
    await session.start({"prompt": "Go."}, 0)
    await session.ended()
    await session.close()
    program, child = map(int, mark.read_text().split())
    os.kill(child, signal.SIGKILL)  # a host's process would take it with it
    with pytest.raises(ProcessLookupError):
        os.kill(program, 0)


async def test_a_program_is_ended_also_where_its_session_closes_while_it_is(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    body = f"""
def session_prompt(params):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    send(id=HEARD[-1]["id"], result={{"stopReason": "end_turn"}})
    assert not sys.stdin.readline()  # it is asked to end
    pathlib.Path({str(mark)!r}).write_text(f"{{os.getpid()}}\\n")
    time.sleep(1000)
"""
    session = await cancelled(acp_environment(tmp_path, body), mark, close_timeout_s=5)
    assert (session.close_failure, session.is_stuck) == (None, False)
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)


async def test_a_program_that_dies_has_failed_also_where_a_child_holds_its_stdout(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    body = f"""
def prompt(text):
    import subprocess
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    pathlib.Path({str(mark)!r}).write_text(str(child.pid))
    os._exit(3)
"""
    session = acp_environment(tmp_path, body).session(limits=Timeouts(close_timeout_s=1))
    session.offer(LLM)
    await session.start({"prompt": "Go."}, 0)
    try:
        async with asyncio.timeout(HANG_S):
            with pytest.raises(EnvironmentFailed, match="ended with exit status 3 before it answered session/prompt"):
                await session.ended()
    finally:
        await session.close()
        os.kill(int(mark.read_text()), signal.SIGKILL)


async def test_what_a_program_has_left_running_may_go_on_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its TMPDIR is removed."""
    remove = shutil.rmtree

    def removed(path: Any, ignore_errors: bool = False, **more: Any) -> None:
        remove(path, ignore_errors, **more)
        if not ignore_errors:
            raise OSError(39, "Directory not empty")

    monkeypatch.setattr("shutil.rmtree", removed)
    said, _ = await played(acp_environment(tmp_path, "def prompt(text):\n    say('done')"))
    assert said == "done"


@pytest.mark.parametrize("name", ["TMPDIR", "GSPO_FOLDER"])
async def test_folders_that_are_too_deep_to_be_removed_fail_no_episode(tmp_path: Path, name: str) -> None:
    body = f"""
def prompt(text):
    os.chdir(os.environ[{name!r}])
    for number in range(3_000):
        os.mkdir("a")
        os.chdir("a")
    say(os.environ[{name!r}])
"""
    environment = acp_environment(tmp_path, body)
    environment.home.get_reward = lambda self, result: {result: 1.0}
    async with played_session(environment) as session:
        _, left = await session.score()
    (folder,) = left
    subprocess.run(["rm", "-rf", "--", folder], check=True)  # noqa: ASYNC221


# --- what a job says


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"acp": {}}, "acp says how a program is spoken to: give command too"),
        ({"url": "https://a.example/", "acp": {}}, "give command too"),
        (
            {"command": ["x"], "acp": {"prompt": "{{answer}}"}},
            r"there is no {{answer}}; use {{task}} or {{task\.FIELD}}",
        ),
        ({"command": ["x"], "acp": {"permissions": "ask"}}, "'allow' or 'reject'"),
        ({"command": ["x"], "acp": True}, "acp"),
    ],
)
def test_a_job_that_says_it_wrongly_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AgentSpec.model_validate(given)


def test_what_a_job_says_is_what_the_agent_is_started_by() -> None:
    acp = {"prompt": "{{task.a}}", "permissions": "reject", "login": "by-key"}
    spec = AgentSpec.model_validate({"command": ["x"], "acp": acp})
    start = AgentStart.from_json(spec.model_dump(exclude_none=True, mode="json"))
    assert start.acp == AcpStart("{{task.a}}", "reject", "by-key")
    plain = AgentSpec.model_validate({"command": ["x"]})
    assert "acp" not in plain.model_dump()
    assert AgentStart.from_json({"command": ["x"], "acp": {}}).acp == AcpStart()


def test_it_is_examined_without_being_started(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text("class Tasks:\n    tasks = [{'a': 1}, {'b': 1}]\n")
    (tmp_path / "agent.py").touch()
    agent = {"command": [sys.executable, "agent.py"], "acp": {"prompt": "{{task.a}}"}}
    report = validate(f"{tmp_path}/tasks.py:Tasks", agent=agent)
    found = {check.id: check.message for check in report.checks}
    assert found["start"].endswith("and is spoken to by the Agent Client Protocol")
    assert "acp.prompt: the task has no field a" in found["tasks"]
