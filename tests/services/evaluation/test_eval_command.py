"""``gspo eval`` as docs/eval.md shows it: with a model of this machine, with an API, one against the other."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gspo_core.cli import main
from services.evaluation import local
from tests.apparatus.warm_python import WarmPython
from tests.repo.pages import block

# Engines start slowly on a busy machine.
pytestmark = pytest.mark.timeout(600)

PAGE = "docs/eval.md"
Type = Callable[[str], str]
Api = tuple[str, list[dict[str, Any]]]


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "shop.py").write_text(block("docs/environments.md", '"""shop.py"""').text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "a-key")
    return tmp_path


@pytest.fixture
def type_in(capsys: pytest.CaptureFixture[str]) -> Type:
    def run(line: str) -> str:
        program, *arguments = shlex.split(line)
        assert program == "gspo"
        status = main(arguments)
        printed = capsys.readouterr()
        assert status == 0, printed.err
        return printed.out

    return run


@pytest.fixture
def warm_engines(warm_python: WarmPython, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines, not environments, have imported torch already."""
    monkeypatch.setattr(local, "sys", SimpleNamespace(executable=str(warm_python.path)))


@pytest.mark.usefixtures("warm_engines")
@pytest.mark.parametrize("by_file", [False, True])
def test_an_engine_started_here_asks_for_no_key_of_others(
    by_file: bool, shop: Path, model: Path, type_in: Type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a trainer's container, where keys of engines are files."""
    if by_file:
        (shop / "gspo_engine_keys").write_text("*=theirs")
        monkeypatch.setenv("GSPO_SECRETS_DIR", str(shop))
    else:
        monkeypatch.setenv("GSPO_ENGINE_KEYS", "*=theirs")
    assert "success" in type_in(f"gspo eval {model} --env shop.py:Shop --n 1 --out runs/one")


@pytest.mark.usefixtures("warm_engines")
def test_the_commands_of_the_page_work(shop: Path, model: Path, api: Api, type_in: Type) -> None:
    url, sent = api

    def as_here(text: str) -> str:
        there = text.replace("models/Qwen3-0.6B", str(model)).replace("models/trained", f"{url}#trained")
        return there.replace("https://api.example.com/v1", url)

    first = type_in(as_here(block(PAGE, "--out runs/base").typed))
    assert "2 held-out tasks, 1 each, seed 0" in first
    assert "success      0.0 % (0.0 to" in first
    both, trained = as_here(block(PAGE, "--against").typed).splitlines()
    printed = type_in(both)
    assert "success      100.0 %" in printed
    assert "difference   +100 points" in printed
    assert "2 better, 0 worse, 0 alike" in printed
    assert {(one["model"], one["key"]) for one in sent} == {("big-model", "Bearer a-key")}
    assert "tasks        2 better, 0 worse, 0 alike" in type_in(trained)
    listing, worst, shown = block(PAGE, "gspo episodes").typed.splitlines()
    assert type_in(listing) == type_in(worst)
    assert [line.split()[0] for line in type_in(listing).splitlines()] == ["runs/base/0/0", "runs/base/1/0"]
    assert "user: 2 x bread, please." in type_in(shown)


def test_typed_again_it_goes_on_with_what_is_kept(shop: Path, api: Api, type_in: Type) -> None:
    url, sent = api
    line = f"gspo eval {url}#m --env shop.py:Shop --split train --samples 2 --out kept --json"
    report = json.loads(type_in(line))
    assert (report["episodes"], report["failed"], report["reward"]["mean"]) == (12, 0, 0.5)
    assert (report["reward"]["num_tasks"], report["reward"]["method"]) == (6, "wilson")
    assert report["stops"] == {"completed": 12}
    num_sent = len(sent)
    file = shop / "kept" / "episodes.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    assert json.loads(type_in(line)) == report
    assert num_sent < len(sent) <= num_sent + 2


def test_evaluations_that_begin_within_a_second_have_folders_of_their_own(
    shop: Path, api: Api, type_in: Type, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, _ = api
    monkeypatch.setattr("time.strftime", lambda form: "20261129-120000")
    line = f"gspo eval {url}#m --env shop.py:Shop --json"
    assert json.loads(type_in(line))["folder"] != json.loads(type_in(line))["folder"]
    assert len([*(shop / "gspo-eval").iterdir()]) == 2


@pytest.mark.slow  # three engines are started
@pytest.mark.usefixtures("warm_engines")
def test_the_same_seed_says_the_same(shop: Path, model: Path, type_in: Type) -> None:
    def said(seed: int, folder: str) -> list[Any]:
        options = f"--max-new-tokens 20 --concurrency 1 --seed {seed} --limits '{{\"max_turns\": 2}}'"
        type_in(f"gspo eval {model} --env shop.py:Shop --split train {options} --out {folder}")
        lines = (shop / folder / "episodes.jsonl").read_text().splitlines()
        return [json.loads(line)["messages"][2:] for line in lines]

    assert said(1, "a") == said(1, "b")
    assert said(1, "a") != said(2, "c")


AGENT = '''
"""An agent that asks once."""

import json
import urllib.request

tasks = [{"word": "a"}, {"word": "b"}]


async def run(task, llm):
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "2 x tea, please."}]
    request = urllib.request.Request(
        f"{llm.base_url}/chat/completions",
        json.dumps({"model": llm.model, "messages": messages}).encode(),
        {"Authorization": f"Bearer {llm.api_key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        call = json.load(answer)["choices"][0]["message"]["tool_calls"][0]
    return float(task["word"] == "a" and "tea" in call["function"]["arguments"])
'''


def test_an_agent_that_owns_its_loop_is_scored_over_an_api(shop: Path, api: Api, type_in: Type) -> None:
    url, sent = api
    (shop / "asking.py").write_text(AGENT)
    report = json.loads(type_in(f"gspo eval {url}#m --env asking.py:run --json"))
    assert (report["reward"]["mean"], report["episodes"], report["tokens_mean"]) == (0.5, 2, None)
    assert {one["key"] for one in sent} == {"Bearer a-key"}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("nowhere --env shop.py:Shop", "nowhere is no directory with a model here"),
        ("some/model --env shop.py:Shop", "`gspo fetch some/model` fetches it"),
        ("http://127.0.0.1:9#m --env shop.py", "name a class or a function"),
        ("http://127.0.0.1:9#m --env shop.py:Stall", "has no 'Stall'"),
        ("http://127.0.0.1:9#m --env shop.py:Shop --n 0", "at least 1"),
        ("http://127.0.0.1:9#m --env shop.py:Shop --limits '{\"turns\": 1}'", "limits.turns"),
        ("http://127.0.0.1:9 --env shop.py:Shop", "/models cannot be read"),
        ("http://host:port/v1#x --env shop.py:Shop", "http://host:port/v1#x is no address: Invalid port: 'port'"),
        ("http:///v1#x --env shop.py:Shop", "http:///v1#x is no address: it names no host"),
        ("http://127.0.0.1:9#m --env shop.py:Shop --against http://host:port/v1#x", "host:port/v1#x is no address"),
        ("http://127.0.0.1:9#m --env shop.py:Shop --max-new-tokens 9", "--max-new-tokens is of a model here"),
        ("http://127.0.0.1:9#m --env shop.py:Shop --chat '{}'", "--chat is of a model here, and none plays"),
        ("http://127.0.0.1:9#m --env shop.py:Shop --device cpu", "--device is of a model here, and none plays"),
        ("some/model --env shop.py:Shop --body '{}'", "--body is of an API, and none plays"),
        ("some/model --env shop.py:Shop --key-env KEY", "--key-env is of an API, and none plays"),
        (
            "http://127.0.0.1:9#m --env shop.py:Shop --against-key-env KEY",
            "--against-key-env is of an API to play against",
        ),
        ("http://127.0.0.1:9#m --env asking.py:run --temperature 1", "this agent asks by itself"),
        ("http://127.0.0.1:9#m --env asking.py:run --body '{}'", "--body says how a model is asked"),
        ("{model} --env {agent}:run", "name that as https://host/v1#MODEL"),
    ],
)
def test_what_cannot_be_is_refused_in_words(
    shop: Path, model: Path, capsys: pytest.CaptureFixture[str], line: str, problem: str
) -> None:
    (shop / "asking.py").write_text(AGENT)
    arguments = shlex.split(line.format(model=model, agent="asking.py") if "{model}" in line else line)
    assert main(["eval", *arguments]) == 1
    assert problem in capsys.readouterr().err
    assert not (shop / "gspo-eval").exists()


@pytest.mark.usefixtures("warm_engines")
def test_a_model_whose_engine_does_not_start_says_why(
    shop: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in model.iterdir():
        (broken / file.name).write_bytes(
            file.read_bytes()[:1000] if file.suffix == ".safetensors" else file.read_bytes()
        )
    assert main(["eval", str(broken), "--env", "shop.py:Shop"]) == 1
    assert "the engine ended with code 1" in capsys.readouterr().err


def test_another_evaluation_is_not_compared_with(shop: Path, api: Api, type_in: Type, capsys: Any) -> None:
    url, sent = api
    type_in(f"gspo eval {url}#m --env shop.py:Shop --out kept")
    (shop / "shop.py").write_text((shop / "shop.py").read_text().replace("1..3", "1 to 3"))
    num_sent = len(sent)
    assert main(["eval", f"{url}#m", "--env", "shop.py:Shop", "--against", "kept"]) == 1
    assert "kept cannot be compared with: it has another source" in capsys.readouterr().err
    assert len(sent) == num_sent


@pytest.mark.parametrize(
    ("against", "problem"),
    [
        ("runs/bsae", "runs/bsae is no directory with a model here"),
        ("http://127.0.0.1:9", "/models cannot be read"),
    ],
)
def test_nothing_is_played_where_the_other_one_is_not_found(
    shop: Path, api: Api, capsys: pytest.CaptureFixture[str], against: str, problem: str
) -> None:
    url, sent = api
    assert main(["eval", f"{url}#m", "--env", "shop.py:Shop", "--against", against, "--out", "both"]) == 1
    assert problem in capsys.readouterr().err
    assert (sent, (shop / "both").exists()) == ([], False)


@pytest.mark.parametrize("printed", ["lines", "json"])
def test_what_was_played_is_told_although_the_other_one_fails(
    shop: Path, api: Api, capsys: pytest.CaptureFixture[str], printed: str
) -> None:
    url, _ = api
    line = f"{url}#m --env shop.py:Shop --against {url}/none#m --out both {'--json' if printed == 'json' else ''}"
    assert main(["eval", *line.split()]) == 1
    out, err = capsys.readouterr()
    assert "answers status 404" in err
    assert "#m is kept in both: add --out both to go on" in err
    kept = json.loads((shop / "both" / "report.json").read_text())
    assert (kept["reward"]["mean"], "against" in kept) == (1.0, False)
    assert json.loads(out) == kept if printed == "json" else "success      100.0 %" in out


@pytest.mark.parametrize("option", ["--out", "--against"])
def test_a_damaged_evaluation_is_refused_and_stays_as_it_is(
    shop: Path, api: Api, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    url, sent = api
    (shop / "kept").mkdir()
    (shop / "kept" / "eval.json").write_text('{"model": "m"')
    assert main(["eval", f"{url}#m", "--env", "shop.py:Shop", option, "kept"]) == 1
    assert "kept/eval.json is damaged" in capsys.readouterr().err
    assert (sent, [one.name for one in (shop / "kept").iterdir()]) == ([], ["eval.json"])


def test_where_every_episode_failed_the_status_says_so(
    shop: Path, api: Api, capsys: pytest.CaptureFixture[str]
) -> None:
    url, _ = api
    source = (shop / "shop.py").read_text().replace("def get_reward(self)", "def get_reward(self, missing)")
    (shop / "shop.py").write_text(source)
    for line in ("--json", "--out failed", f"--against {url}#other"):
        assert main(["eval", f"{url}#m", "--env", "shop.py:Shop", *line.split()]) == 1
        assert "missing" in capsys.readouterr().out


@pytest.mark.usefixtures("shop")
def test_the_service_may_be_named_without_a_scheme(capsys: pytest.CaptureFixture[str]) -> None:
    job = "job_01m2x4j8w0e9qk3v5t7y1r6n2b"
    assert main(["eval", job, "--env", "shop.py:Shop", "--url", "127.0.0.1:1"]) == 1
    assert "http://127.0.0.1:1 cannot be asked" in capsys.readouterr().err
