"""docs/gsm8k.md, typed from top to bottom in a new folder, against a server that stands in for the hub.

What differs from what is typed: the port is a free one; the hub's model has the files and the architecture of Qwen3
with small random weights; its problems are generated ones of the same format, as lines instead of Parquet.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
import transformers

from gspo_core.cli.watch import TERMINAL
from services.files.data_dir import commit_of
from services.process.ports import free_port
from tests.apparatus.hub_server import Hub, Repository, running
from tests.chaos.talk import write_tokenizer
from tests.repo.block_table import GSM8K, held
from tests.repo.pages import ROOT, blocks, without_comments

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

PAGE = "docs/gsm8k.md"
COMMIT = "c1899de289a04d12100db370d81485cdf75e47ca"
CONTEXT_TOKENS = 4096
START_S, COMMAND_S, END_S = 240.0, 600.0, 60.0


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    directory = tmp_path_factory.mktemp("qwen")
    write_tokenizer(directory)
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(directory)
    model = {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}
    data = ROOT / "environments" / "data"
    problems = {f"{split}.jsonl": (data / f"gsm8k_generated_{split}.jsonl").read_bytes() for split in ("train", "test")}
    repositories = {
        "models/Qwen/Qwen3-0.6B": Repository(model | {"README.md": b"# Qwen"}, COMMIT),
        "datasets/openai/gsm8k": Repository(problems | {"README.md": b"# gsm8k"}, COMMIT),
    }
    with running(Hub(repositories)) as hub:
        yield hub


class Terminal:
    """A folder in which the commands are typed, one after the other."""

    def __init__(self, folder: Path, hub: Hub) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("GSPO_", "HF_"))}
        self.environment = clean | {
            "PATH": f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}",
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(folder / "home"),
            "GSPO_URL": self.url,
            "CUDA_VISIBLE_DEVICES": "",
        }

    def typed(self, text: str) -> str:
        """What the lines print."""
        text = text.replace("localhost:8000", f"127.0.0.1:{self.port}")
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=COMMAND_S,
        )
        assert done.returncode == 0, (text, done.stdout, done.stderr)
        return done.stdout

    def up(self, command: str) -> tuple[subprocess.Popen[bytes], Path]:
        said = self.folder / "said"
        with said.open("wb") as file:
            stack = subprocess.Popen(
                ["bash", "-c", f"exec {command} --port {self.port}"],
                cwd=self.folder,
                env=self.environment | {"PYTHONUNBUFFERED": "1"},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_S
        while "submit a job with" not in said.read_text():
            assert stack.poll() is None, said.read_text()
            assert time.monotonic() < deadline, said.read_text()
            time.sleep(0.1)
        return stack, said


def page(part: str) -> str:
    """The block that holds ``part``, without its comments."""
    (one,) = [one for one in blocks() if one.page == PAGE and part in one.text and held(one) == [GSM8K]]
    return without_comments(one.typed) if one.language == "sh" else one.text


def test_the_page_leads_from_nothing_to_a_model_that_was_trained(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "environments").symlink_to(ROOT / "environments")
    terminal = Terminal(tmp_path, hub)
    model_dir = Path(terminal.typed(page("gspo fetch Qwen")).splitlines()[0])
    assert commit_of(model_dir) == COMMIT
    assert "every episode was closed" in terminal.typed(page("gspo env validate"))
    terminal.typed("gspo env validate environments.gsm8k:GSM8K")
    stack, said = terminal.up(page("gspo up").strip())
    try:
        _train_and_export(terminal, model_dir)
        stack.send_signal(signal.SIGINT)
        assert stack.wait(END_S) == 0, said.read_text()
    finally:
        if stack.poll() is None:
            os.killpg(stack.pid, signal.SIGKILL)
            stack.wait()


def _train_and_export(terminal: Terminal, model_dir: Path) -> None:
    (terminal.folder / "first.yaml").write_text(page("# first.yaml"))
    shipped = terminal.typed("gspo submit environments/gsm8k_gspo.yaml --dry-run")
    assert f"on {model_dir}" in shipped
    terminal.typed(page("gspo submit first.yaml"))
    (job,) = httpx.get(f"{terminal.url}/v1/jobs").json()["data"]
    assert job["status"] in TERMINAL
    assert job["status"] == "succeeded", job["status_reason"]
    assert httpx.get(f"{terminal.url}/v1/jobs/{job['id']}/config").json()["config"]["model"] == str(model_dir)
    terminal.environment["JOB"] = job["id"]
    terminal.typed(page("export"))
    checkpoint = f"{terminal.url}/v1/checkpoints/{job['id']}/1/2"
    deadline = time.monotonic() + COMMAND_S
    while (shown := httpx.get(checkpoint).json())["export"]["status"] == "exporting":
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert shown["export"]["status"] == "ready", shown
    (exported,) = (terminal.folder / ".gspo" / "jobs" / job["id"] / "exports").iterdir()
    assert {"config.json", "tokenizer.json"} <= {path.name for path in exported.iterdir()}
    assert list(exported.glob("*.safetensors"))
