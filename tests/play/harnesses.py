"""Coding agents as their users start them: unmodified programs, each given a task, a base URL and a key.

Rule: a harness is its command and its settings. What it runs for the policy is harmless, and stays in a folder of its
own.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gspo_core.env import Llm
from gspo_core.env.acp_run import AcpStart
from tests.play.packages import INSTALLED as PYTHONS

INSTALLED = Path(os.environ.get("GSPO_TEST_HARNESSES", Path(__file__).parents[2] / ".make" / "harnesses"))
Words = Callable[[Llm, Path, str, bool], Sequence[str]]
"""The command, for a home, a task, and whether it goes on with what it did there before."""
Calls = Callable[[random.Random], Sequence[Mapping[str, Any]]]
"""What the policy may do in one turn."""
SHELL = (
    "ls -la",
    "cat a.txt",
    "echo Größe 🦊 '<|im_end|>'",
    "false",
    "printf '<tool_call>\\n{}\\n'",
    "wc -c a.txt",
    "pwd",
)
HARMLESS = {"NO_COLOR": "1", "TERM": "dumb", "CI": "1", "NO_PROXY": "127.0.0.1", "LANG": "C.UTF-8"}


@dataclass(frozen=True)
class Harness:
    name: str
    package: str
    """As npm has it, or pip, with its version."""
    words: Words
    env: Callable[[Llm], Mapping[str, str]]
    calls: Calls
    last: Mapping[str, Any] | None = None
    """The call by which the policy says that it is done; None: words without one."""
    acp: AcpStart | None = None
    """Set where it is spoken to by the Agent Client Protocol, in one session, with what a job would say."""


def _call(name: str, **arguments: Any) -> Mapping[str, Any]:
    return {"name": name, "arguments": arguments}


def _bin(name: str) -> str:
    return str(INSTALLED / "node_modules" / ".bin" / name)


def _acp(name: str, *arguments: str, prepared: Words | None = None) -> Words:
    """The program ``name``, spoken to by the Agent Client Protocol; ``prepared`` writes its settings."""

    def words(llm: Llm, home: Path, task: str, goes_on: bool) -> Sequence[str]:
        if prepared is not None:
            prepared(llm, home, task, goes_on)
        return [_bin(name), *arguments]

    return words


def claude(llm: Llm, home: Path, task: str, goes_on: bool) -> Sequence[str]:
    more = ["--continue"] if goes_on else []
    return [_bin("claude"), "-p", task, *more, "--output-format", "json", "--model", "policy", "--allowedTools", "Bash"]


def codex(llm: Llm, home: Path, task: str, goes_on: bool) -> Sequence[str]:
    folder = home / ".codex"
    folder.mkdir(exist_ok=True)
    provider = f'name = "gspo"\nbase_url = "{llm.base_url}"\nenv_key = "OPENAI_API_KEY"\nwire_api = "responses"\n'
    # What its sandbox is made of is not on every machine; the adapter has no other way to say it than this file.
    model = 'model = "policy"\nmodel_provider = "gspo"\nsandbox_mode = "danger-full-access"\n'
    (folder / "config.toml").write_text(f"{model}[model_providers.gspo]\n{provider}")
    how = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return [_bin("codex"), "exec", *(["resume", "--last"] if goes_on else []), *how, task]


def qwen(llm: Llm, home: Path, task: str, goes_on: bool) -> Sequence[str]:
    more = ["--continue"] if goes_on else []
    return [_bin("qwen"), "-p", task, *more, "--yolo", "--auth-type", "openai", "-m", "policy"]


def opencode(llm: Llm, home: Path, task: str, goes_on: bool) -> Sequence[str]:
    options = {"baseURL": llm.base_url, "apiKey": llm.api_key}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {"policy": {"name": "policy"}}}
    config = {"autoupdate": False, "share": "disabled", "model": "gspo/policy", "small_model": "gspo/policy"}
    (home / "work" / "opencode.json").write_text(json.dumps(config | {"provider": {"gspo": provider}}))
    return [_bin("opencode"), "run", *(["--continue"] if goes_on else []), task]


def gemini(llm: Llm, home: Path, task: str, goes_on: bool) -> Sequence[str]:
    folder = home / ".gemini"
    folder.mkdir(exist_ok=True)
    settings = {
        "security": {"auth": {"selectedType": "gemini-api-key"}},
        "privacy": {"usageStatisticsEnabled": False},
        "general": {"enableAutoUpdate": False},
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    more = ["--resume", "latest"] if goes_on else []
    return [_bin("gemini"), "-p", task, *more, "--yolo", "-m", "policy"]


def mini(llm: Llm, home: Path, task: str, goes_on: bool) -> Sequence[str]:
    """It goes on with nothing: each run is a conversation of its own."""
    python = PYTHONS / "mini-swe-agent" / "bin" / "mini"
    how = ["-y", "--exit-immediately", "-l", "0", "-c", "mini.yaml", "-c", "agent.step_limit=12"]
    return [str(python), "-t", task, "-m", "openai/policy", *how]


def _anthropic(llm: Llm) -> Mapping[str, str]:
    return {
        "ANTHROPIC_BASE_URL": llm.base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": llm.api_key,
        "ANTHROPIC_SMALL_FAST_MODEL": "policy",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "ANTHROPIC_MODEL": "policy",
        # Its adapter offers all permissions, which it refuses to root elsewhere.
        "IS_SANDBOX": "1",
    }


def _qwen(llm: Llm) -> Mapping[str, str]:
    # Else it starts itself a second time, for more memory.
    return {**_openai(llm), "QWEN_CODE_NO_RELAUNCH": "true"}


def _openai(llm: Llm) -> Mapping[str, str]:
    return {"OPENAI_BASE_URL": llm.base_url, "OPENAI_API_KEY": llm.api_key, "OPENAI_MODEL": "policy"}


def _mini(llm: Llm) -> Mapping[str, str]:
    # It asks for its settings at its first start, and ends at a model that has no price.
    own = {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    return {**_openai(llm), **own}


def _gemini(llm: Llm) -> Mapping[str, str]:
    return {
        "GOOGLE_GEMINI_BASE_URL": llm.gemini_base_url,
        "GEMINI_API_KEY": llm.api_key,
        "GEMINI_CLI_TRUST_WORKSPACE": "true",
        "GEMINI_CLI_NO_RELAUNCH": "true",
    }


_PLAIN = (
    Harness(
        "Claude Code",
        "@anthropic-ai/claude-code@2.1.332",
        claude,
        _anthropic,
        lambda rng: [_call("Bash", command=rng.choice(SHELL), description="look")],
    ),
    Harness(
        "Codex",
        "@openai/codex@0.171.0",
        codex,
        _openai,
        lambda rng: [_call("exec_command", cmd=rng.choice(SHELL))],
    ),
    Harness(
        "Qwen Code",
        "@qwen-code/qwen-code@0.24.4",
        qwen,
        _qwen,
        lambda rng: [_call("run_shell_command", command=rng.choice(SHELL), is_background=False)],
    ),
    Harness(
        "OpenCode",
        "opencode-ai@1.18.33",
        opencode,
        lambda llm: {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
        lambda rng: [_call("bash", command=rng.choice(SHELL), description="look")],
    ),
    Harness(
        "Gemini CLI",
        "@google/gemini-cli@0.61.0",
        gemini,
        _gemini,
        lambda rng: [_call("run_shell_command", command=rng.choice(SHELL), description="look")],
    ),
)
_BY_PIP = (
    Harness(
        "mini-swe-agent",
        "mini-swe-agent==2.4.6",
        mini,
        _mini,
        lambda rng: [_call("bash", command=rng.choice(SHELL))],
        last=_call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    ),
)

_SPOKEN_TO = {
    "Claude Code": (_acp("claude-code-acp"), "@zed-industries/claude-code-acp@0.16.2", AcpStart()),
    "Codex": (_acp("codex-acp", prepared=codex), "@zed-industries/codex-acp@0.16.0", AcpStart()),
    "Qwen Code": (_acp("qwen", "--acp", "--auth-type", "openai", "-m", "policy"), "", AcpStart()),
    "OpenCode": (_acp("opencode", "acp", prepared=opencode), "", AcpStart()),
    "Gemini CLI": (_acp("gemini", "--acp", "-m", "policy", prepared=gemini), "", AcpStart()),
}
"""By the name of the program that is started otherwise: the command, the package where it is another one, the job."""


def _spoken_to(one: Harness) -> Harness:
    words, package, acp = _SPOKEN_TO[one.name]
    return replace(one, name=f"{one.name} (ACP)", package=package or one.package, words=words, acp=acp)


HARNESSES: Mapping[str, Harness] = {one.name: one for one in (*_PLAIN, *_BY_PIP, *map(_spoken_to, _PLAIN))}


if __name__ == "__main__":
    print(*dict.fromkeys(one.package for one in HARNESSES.values() if one not in _BY_PIP))
