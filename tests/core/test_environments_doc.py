"""The page for authors: its files are written, its commands are run, and what it prints is what they print."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

from gspo_core.chat import load_codec
from gspo_core.cli import main
from gspo_core.env import load_environment
from gspo_core.job_spec import ChatSpec
from gspo_core.spec_file import load_job_spec
from gspo_core.types import StopReason
from tests.core.env_kit import call, play

PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of the page, in the current directory."""
    for language, text in BLOCKS:
        named = re.match(r'(?:"""|# )([\w.]+)', text)
        if language in ("python", "yaml") and named:
            (tmp_path / named[1]).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def console(command: str) -> str:
    """What the page shows below a command."""
    (shown,) = (text for language, text in BLOCKS if language == "console" and text.startswith(f"$ {command}\n"))
    return str(shown.partition("\n")[2])


def test_the_first_environment_prints_what_the_page_says(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "validate", "shop.py:Shop"]) == 0
    shown = capsys.readouterr().out
    promised = console("gspo env validate shop.py:Shop")
    assert promised.count("\n") == 11
    assert shown.startswith(promised)


def test_the_refused_one_is_refused_for_the_reason_given(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "validate", "leaking.py:Leaking"]) == 1
    assert console("gspo env validate leaking.py:Leaking").strip() in capsys.readouterr().out


def test_it_can_be_played_as_the_page_says(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("pack item=tea\nHere you are.\n"))
    assert main(["env", "play", "shop.py:Shop"]) == 0
    assert "reward 1" in capsys.readouterr().out


def test_a_call_of_a_tool_that_is_not_there_is_answered_and_a_file_is_no_class(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("unpack item=tea\npack item=tea\nHere you are.\n"))
    assert main(["env", "play", "shop.py:Shop"]) == 0
    shown = capsys.readouterr().out
    assert "unpack" in shown
    assert "reward 1" in shown
    assert main(["env", "validate", "shop.py"]) == 1
    assert "as in shop.py:Shop" in capsys.readouterr().err
    Path("guess.py").write_text("tasks = [{}]\n\n\ndef run(task, llm):\n    return 1.0\n")
    assert main(["env", "validate", "guess.py"]) == 1
    assert "or an agent's function, as in guess.py:run" in capsys.readouterr().err


def test_the_line_for_tests_works(folder: Path) -> None:
    (source,) = (text for language, text in BLOCKS if "check_environment" in text and language == "python")
    exec(compile(source, "page", "exec"), {})


async def test_functions_and_classes_for_trl_work(folder: Path) -> None:
    prices = load_environment("prices.py:Prices")
    assert (await play(prices, call("price", item="tea"), "It is 3.")).reward == 1.0
    world = load_environment("mine.py:world")
    played = await play(world, call("increment", step=1), "done")
    assert (played.first[0]["content"], played.reward) == ("Count to 2.", 0.5)


async def test_arguments_arrive_as_declared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "validate", "delivery.py:Delivery"]) == 0
    shown = capsys.readouterr().out
    assert "oracle 1" in shown
    assert "!" not in shown
    environment = load_environment("delivery.py:Delivery")
    wrong = {"parcels": [{"to": "Ada", "grams": 0}], "window": {"day": "soon"}}
    played = await play(environment, call("send", **wrong), call("send", parcels=[], window={"day": "soon"}), "x")
    assert [message["content"] for message in played.answers] == [
        "error: parcels[0].grams: Input should be greater than or equal to 1",
        "error: window.day must be a date, not 'soon'",
    ]
    (tool,) = environment.tools
    properties = tool["function"]["parameters"]["properties"]
    texts = {name: schema.get("description") for name, schema in properties.items()}
    assert texts["note"] == "for the driver"
    assert texts["parcels"] == "what to send"


def test_the_job_is_a_job(folder: Path) -> None:
    assert load_job_spec(folder / "shop.yaml").environments[0].ref == "shop.py:Shop"


def test_the_tables_name_everything_there_is() -> None:
    assert {f"`chat.{name}`" for name in ChatSpec.model_fields} == set(re.findall(r"`chat\.\w+`", PAGE))
    ends = set(re.findall(r"`(\w+)`", PAGE.partition("## How an episode ends")[2].partition("## What")[0]))
    assert {str(reason) for reason in StopReason} - {"cancelled", "stale"} <= ends
    assert load_codec.__kwdefaults__.keys() == ChatSpec.model_fields.keys()
