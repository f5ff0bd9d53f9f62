"""`gspo fetch` and `gspo up --model OWNER/NAME`, over a server that stands in for the hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.files.data_dir import HubDir, HubKind, HubName, commit_of
from tests.apparatus.hub_server import Hub, Repository, running

COMMIT = "c0ffee" + "0" * 34
QWEN = "Qwen/Qwen3-0.6B"
FILES = {
    "config.json": b'{"model_type": "qwen3"}',
    "tokenizer.json": b"{}",
    "merges.txt": b"a b\n",
    "model.safetensors": b"weights" * 1000,
    "pytorch_model.bin": b"\x80\x04 a pickle",
    "modeling_qwen.py": b"raise SystemExit('code')",
    "onnx/config.json": b"{}",
    ".gitattributes": b"",
    "README.md": b"# Qwen",
}
Gspo = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running(Hub({f"models/{QWEN}": Repository(FILES, COMMIT)})) as hub:
        yield hub


@pytest.fixture
def gspo(hub: Hub, tmp_path: Path) -> Gspo:
    """The command, typed in a folder of its own."""

    def typed(*words: str, **settings: str) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("GSPO_", "HF_"))}
        environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), **settings}
        command = [str(Path(sys.executable).with_name("gspo")), *words]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    return typed


def below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_model_is_fetched_whole_once_and_without_what_could_be_code(gspo: Gspo, hub: Hub, tmp_path: Path) -> None:
    done = gspo("fetch", QWEN)
    assert done.returncode == 0, done.stderr
    found = Path(done.stdout.strip())
    assert found == tmp_path / ".gspo" / "hub" / "models" / f"Qwen--Qwen3-0.6B@{COMMIT}"
    assert below(found) == {"config.json", "tokenizer.json", "merges.txt", "model.safetensors", "fetched.json"}
    assert (found / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert json.loads((found / "fetched.json").read_text())["commit"] == COMMIT == commit_of(found)
    assert not [one for one in hub.asked if ".bin" in one or ".py" in one]
    hub.asked.clear()
    assert Path(gspo("fetch", QWEN).stdout.strip()) == found
    assert not [one for one in hub.asked if "/resolve/" in one]
    hub.asked.clear()
    assert Path(gspo("fetch", f"{QWEN}@{COMMIT}").stdout.strip()) == found
    assert hub.asked == [], "a commit that is there needs no network"


def test_what_does_not_arrive_whole_is_not_there(gspo: Gspo, hub: Hub, tmp_path: Path) -> None:
    hub.repositories[f"models/{QWEN}"].spoilt = {"model.safetensors"}
    done = gspo("fetch", QWEN)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.endswith("gspo: Qwen/Qwen3-0.6B did not arrive whole: model.safetensors; fetch it again\n")
    kept = HubDir(tmp_path / ".gspo" / "hub")
    assert kept.fetched(HubKind.MODEL, HubName("Qwen", "Qwen3-0.6B")) is None
    hub.repositories[f"models/{QWEN}"].spoilt = set()
    assert gspo("fetch", QWEN).returncode == 0


def test_what_had_arrived_when_a_download_ended_is_not_asked_for_again(gspo: Gspo, hub: Hub) -> None:
    hub.repositories[f"models/{QWEN}"].missing = {"tokenizer.json"}
    assert gspo("fetch", QWEN).returncode == 1
    assert f"GET /{QWEN}/resolve/{COMMIT}/model.safetensors" in hub.asked
    hub.repositories[f"models/{QWEN}"].missing = set()
    hub.asked.clear()
    done = gspo("fetch", QWEN)
    assert done.returncode == 0, done.stderr
    assert f"GET /{QWEN}/resolve/{COMMIT}/tokenizer.json" in hub.asked
    assert f"GET /{QWEN}/resolve/{COMMIT}/model.safetensors" not in hub.asked


def test_two_that_fetch_at_once_fetch_it_once(gspo: Gspo, hub: Hub) -> None:
    with ThreadPoolExecutor(2) as both:
        done = list(both.map(lambda _: gspo("fetch", QWEN), range(2)))
    assert [one.returncode for one in done] == [0, 0], done
    assert done[0].stdout == done[1].stdout
    assert hub.asked.count(f"GET /{QWEN}/resolve/{COMMIT}/model.safetensors") == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Qwen/Nothing", "the hub has no model Qwen/Nothing"),
        (f"{QWEN}@nope", "the hub has Qwen/Qwen3-0.6B, but no revision nope of it"),
        ("Qwen/Pickled", "Qwen/Pickled has no *.safetensors: files that can hold code"),
        ("nowhere", "nowhere is no name of the hub"),
    ],
)
def test_what_cannot_be_had_is_one_sentence(gspo: Gspo, hub: Hub, name: str, message: str) -> None:
    hub.repositories["models/Qwen/Pickled"] = Repository({"config.json": b"{}", "pytorch_model.bin": b"pickle"})
    done = gspo("fetch", name)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_without_the_hub_it_says_so(gspo: Gspo) -> None:
    done = gspo("fetch", QWEN, HF_ENDPOINT="http://127.0.0.1:9")
    assert done.returncode == 1
    assert "gspo: Qwen/Qwen3-0.6B could not be fetched: " in done.stderr
    assert "Traceback" not in done.stderr


def test_up_fetches_only_where_it_may_and_says_how_to_allow_it(gspo: Gspo, hub: Hub, tmp_path: Path) -> None:
    refused = gspo("up", "--port", "0", "--model", QWEN)
    assert refused.returncode == 1
    assert "gspo fetch Qwen/Qwen3-0.6B" in refused.stderr
    assert "GSPO_ALLOW_DOWNLOADS=true" in refused.stderr
    assert hub.asked == []
    gone = gspo("up", "--port", "0", "--model", "Qwen/Nothing", GSPO_ALLOW_DOWNLOADS="true")
    assert gone.returncode == 1
    assert "gspo up: the hub has no model Qwen/Nothing" in gone.stderr


def test_a_data_set_is_copied_to_where_a_job_names_it(gspo: Gspo, hub: Hub, tmp_path: Path) -> None:
    lines = b'{"question": "1 + 1?", "answer": "#### 2"}\n'
    files = {
        "train.jsonl": lines,
        "test.jsonl": lines,
        "gsm8k.py": b"code",
        "main/train-00000-of-00001.parquet": b"PAR1",
    }
    hub.repositories["datasets/openai/gsm8k"] = Repository(files, COMMIT)
    done = gspo("fetch", "--dataset", "openai/gsm8k", "--to", "data/gsm8k")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "data" / "gsm8k")
    names = {"train.jsonl", "test.jsonl", "main/train-00000-of-00001.parquet", "fetched.json"}
    assert below(tmp_path / "data" / "gsm8k") == names
    assert gspo("fetch", "--dataset", "openai/gsm8k", "--to", "data/gsm8k").returncode == 1


def folder_of_a_bucket(tmp_path: Path, files: dict[str, bytes]) -> str:
    folder = tmp_path / "given"
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder.as_uri()


def test_a_model_comes_from_a_bucket_without_what_could_be_code(gspo: Gspo, hub: Hub, tmp_path: Path) -> None:
    done = gspo("fetch", folder_of_a_bucket(tmp_path, FILES), "--to", "models/qwen")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "models" / "qwen")
    assert below(tmp_path / "models") == {
        f"qwen/{name}" for name in ("config.json", "tokenizer.json", "merges.txt", "model.safetensors")
    }
    assert (tmp_path / "models/qwen/model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert hub.asked == []


def test_what_a_bucket_cannot_give_is_one_sentence_and_leaves_nothing(gspo: Gspo, tmp_path: Path) -> None:
    address = folder_of_a_bucket(tmp_path, {"config.json": b"{}", "pytorch_model.bin": b"pickle"})
    pickled = gspo("fetch", address, "--to", "models/qwen")
    assert pickled.returncode == 1
    assert "has no *.safetensors: files that can hold code" in pickled.stderr
    assert below(tmp_path / "models") == set()
    nameless = gspo("fetch", address)
    assert nameless.returncode == 1
    assert "--to: what comes from a bucket has no name of its own" in nameless.stderr
    strange = gspo("fetch", "ftp://somewhere/model", "--to", "models/qwen")
    assert "ftp://somewhere/model is the address of no object store" in strange.stderr
    assert "Traceback" not in pickled.stderr + nameless.stderr + strange.stderr


def test_a_container_fetches_without_the_command(tmp_path: Path) -> None:
    address = folder_of_a_bucket(tmp_path, FILES)
    command = [sys.executable, "-m", "services.launch.fetch", address, "--to", str(tmp_path / "model")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, str(tmp_path / "model")), done.stderr
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (again.returncode, again.stderr) == (1, f"services.launch.fetch: {tmp_path / 'model'} is there already\n")


def test_names_of_the_hub_are_told_from_paths() -> None:
    assert str(HubName.parse("Qwen/Qwen3-0.6B@main")) == "Qwen/Qwen3-0.6B@main"
    for path in ("m", "/models/m", "./models/m", "models/a/b", "../m", "a/b c", "models/"):
        assert HubName.parse(path) is None, path
