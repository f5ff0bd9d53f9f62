"""A tiny random model that can be spoken to, and an API that speaks chat completions."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.core.chat_kit import VOCAB_SIZE, write_tokenizer


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Says random things: far from flat, so that another seed says others."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    directory = tmp_path_factory.mktemp("eval") / "model"
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return write_tokenizer(directory)


class Shopkeeper(BaseHTTPRequestHandler):
    """Serves each customer of docs/environments.md right, but for those who want `never`."""

    never = "cake"
    sent: list[dict[str, Any]]

    def do_POST(self) -> None:
        if self.path != "/v1/chat/completions":
            self.send_error(404)
            return
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.sent.append({**body, "key": self.headers.get("authorization")})
        first, last = body["messages"][1]["content"], body["messages"][-1]
        count, _, rest = first.partition(" x ")
        message: dict[str, Any] = {"role": "assistant", "content": "Here you are."}
        if last["role"] != "tool" and not rest.startswith(self.never):
            arguments = json.dumps({"item": rest.removesuffix(", please."), "count": int(count)})
            function = {"name": "pack", "arguments": arguments}
            message = {"role": "assistant", "content": None}
            message["tool_calls"] = [{"id": "c", "type": "function", "function": function}]
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        answer = json.dumps({"choices": [choice], "usage": {"completion_tokens": 4}}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def api() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Its base URL, and what it was sent."""
    sent: list[dict[str, Any]] = []
    handler = type("Handler", (Shopkeeper,), {"sent": sent})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1", sent
        finally:
            server.shutdown()
            thread.join()
