"""A job whose rewards a model gives: every reward that was trained is what the judge said of that very answer."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from examples.demo.demo import follow_job, judge, started
from gspo_core.client import Client
from tests.e2e.test_agents import short_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

KEY = "sk-of-the-test"
PROMPT = "{{answer}}"


class Marks:
    """An OpenAI-compatible server that gives the length of what it is shown, and often fails."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.failed = 0
        self._rng = random.Random(0)
        self._lock = threading.Lock()

    def answer(self, body: bytes, key: str | None) -> tuple[int, str]:
        (message,) = json.loads(body)["messages"]
        with self._lock:
            if key != f"Bearer {KEY}":
                return 401, "who are you?"
            if self._rng.random() < 0.2:
                self.failed += 1
                return self._rng.choice([(503, "busy"), (200, "{}"), (200, said("no idea"))])
            self.asked.append(message["content"])
            return 200, said(f"I think: {json.dumps({'score': mark(message['content'])})}")


def mark(answer: str) -> float:
    return len(answer) / 1000


def said(text: str) -> str:
    return json.dumps({"choices": [{"index": 0, "message": {"role": "assistant", "content": text}}]})


@contextmanager
def marking(marks: Marks) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            status, text = marks.answer(body, self.headers["authorization"])
            self.send_response(status)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_judges_score_is_the_reward_that_is_trained(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = Marks()
    with marking(marks) as host:
        monkeypatch.setenv("GSPO_OUTBOUND_NETWORKS", "127.0.0.0/8")
        monkeypatch.setenv("GSPO_JUDGE_KEYS", f"mine@{host}={KEY}")
        asked = {"url": f"http://{host}/v1", "model": "m", "prompt": PROMPT, "key": "mine"}
        environments = [{"ref": "examples.agent.agent:run", "agent": {"judge": asked}}]
        spec = short_job(model_dir, environments=environments)
        with started(tmp_path, model_dir, quiet=True) as stack:
            followed = follow_job(stack, spec, quiet=True)
            with Client(stack.api_url) as client:
                episodes = [client.episode(one["id"]) for one in client.episodes(followed.view.job_id)]
    trained = [one for one in episodes if one["step"] is not None]
    assert len(trained) == 2 * 8 * 8
    for one in trained:
        text = one["turns"][-1]["text"]
        assert text in marks.asked
        assert one["reward"] == pytest.approx(mark(text))
        assert one["reward_parts"] == {"judge": pytest.approx(mark(text))}
    provenance = judge(spec, tmp_path, followed, quiet=True).provenance
    print(len(marks.asked), marks.failed, provenance)
    assert marks.failed > 10
    assert provenance.num_tokens == provenance.num_equal == 200
