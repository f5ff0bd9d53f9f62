"""What the vLLM client refuses, and what it does between two answers. A real vLLM: ``test_engine_promises.py``."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.engines.inside_vllm.gspo_vllm import WeightsFromFolder, shapes_in
from services.engines.protocol import (
    EngineDirty,
    EngineInfo,
    EngineLoad,
    EngineProtocolError,
    EngineRejected,
    EngineUnavailable,
)
from services.engines.vllm import VllmClient
from services.engines.vllm_metrics import load_in

RID = "5" * 32
METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="/m/v0"} 3.0
vllm:num_requests_running{engine="1",model_name="/m/v0"} 1.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="/m/v0"} 0.0
vllm:num_requests_waiting{engine="1",model_name="/m/v0"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="/m/v0",reason="capacity"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="/m/v0"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="/m/v0"} 0.5
vllm:cache_config_info{block_size="128",engine="0",kv_cache_size_tokens="1024",num_gpu_blocks="8"} 1.0
vllm:cache_config_info{block_size="128",engine="1",kv_cache_size_tokens="1024",num_gpu_blocks="8"} 1.0
"""


def answer(ids: list[int], logprobs: list[float] | None = None, **changes: Any) -> dict[str, Any]:
    values = logprobs if logprobs is not None else [-1.0] * len(ids)
    content = [
        {"token_id": one, "logprob": value, "rank": 1, "top_logprobs": []}
        for one, value in zip(ids, values, strict=True)
    ]
    choice = {
        "index": 0,
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": ids,
        "logprobs": {"content": content},
        "weight_versions": [{"version": "job/1/1", "start": 0, "end": len(ids)}],
    }
    usage = {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 128}}
    return {"request_id": f"generate-tokens-{RID}", "choices": [choice | changes], "usage": usage}


@dataclass
class Server:
    """What a vLLM holds that the client asks for, and a line for each call that changes something."""

    generated: dict[str, Any] = field(default_factory=dict)
    label: str = "job/1/0"
    is_paused: bool = False
    quantization: str | None = None
    max_model_len: int | None = None
    loaded: list[dict[str, str]] | int = field(default_factory=lambda: [{"refused": ""}])
    """By rank; a number is the status of a failure."""
    statuses: dict[str, int] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    asked: dict[str, Any] = field(default_factory=dict)

    def client(self) -> VllmClient:
        return VllmClient("vllm+http://engine:1", httpx.AsyncClient(transport=httpx.MockTransport(self.handle)))

    def handle(self, request: httpx.Request) -> httpx.Response:
        path, body = request.url.path, json.loads(request.content or b"{}")
        if path in self.statuses:
            return httpx.Response(self.statuses[path], json={"error": {"message": "no"}})
        if path == "/inference/v1/generate":
            self.asked = body
            return httpx.Response(200 if body else 400, json=self.generated)
        if request.method == "GET":
            return self._told(path)
        self.calls.append(f"{path}?{request.url.query.decode()}" if request.url.query else path)
        return self._done(path, body)

    def _told(self, path: str) -> httpx.Response:
        told = {
            "/is_paused": {"is_paused": self.is_paused},
            "/weight_info": {"weight_version": self.label},
            "/version": {"version": "0.32.0"},
            "/v1/models": {
                "object": "list",
                "data": [{"id": "m", "root": "/m/v0", "max_model_len": self.max_model_len}],
            },
            "/health": {},
            "/server_info": {"vllm_config": {"model_config": {"quantization": self.quantization}, "cache_config": {}}},
        }
        return httpx.Response(200, json=told[path]) if path in told else httpx.Response(405)

    def _done(self, path: str, body: dict[str, Any]) -> httpx.Response:
        match path:
            case "/update_weight_version":
                self.label = body["new_version"]
                self.calls[-1] += f" {self.label!r}"
            case "/pause" | "/resume":
                self.is_paused = path == "/pause"
            case "/collective_rpc":
                if isinstance(self.loaded, int):
                    return httpx.Response(self.loaded, json={"error": {"message": "a rank failed"}})
                return httpx.Response(200, json={"results": self.loaded})
            case "/reset_prefix_cache":
                return httpx.Response(200, json={"success": True})
        return httpx.Response(200, json={})


async def generate(server: Server) -> Any:
    return await server.client().generate(
        [1, 2, 3], max_new_tokens=4, temperature=1.0, stop_token_ids=[9], rid=RID, extra_key="job/1/1", vocab_size=100
    )


@pytest.mark.parametrize(("said", "found"), [(4096, 4096), (None, 0)])
async def test_the_longest_sequence_is_what_it_says(said: int | None, found: int) -> None:
    assert (await Server(answer([4]), max_model_len=said).client().capabilities()).context_tokens == found


async def test_an_answer_becomes_tokens_under_the_label_that_sampled_them() -> None:
    server = Server(answer([4, 5, 9], finish_reason="stop"))
    found = await generate(server)
    assert (found.output_ids, found.finish_reason, found.cached_tokens) == ([4, 5, 9], "stop", 128)
    assert [(span.label, span.start, span.end) for span in found.spans] == [("job/1/1", 0, 3)]
    assert server.asked["token_ids"] == [1, 2, 3]
    assert re.fullmatch("[0-9a-f]{32}", server.asked["cache_salt"])  # a slash would be refused
    assert server.asked["sampling_params"]["stop_token_ids"] == [9]


async def test_the_pieces_of_a_seeded_answer_draw_other_numbers_and_each_of_them_the_same_again() -> None:
    async def seed_of(prompt: list[int], seed: int | None) -> int | None:
        server = Server(answer([4]))
        await server.client().generate(
            prompt, max_new_tokens=1, temperature=1.0, stop_token_ids=[], rid=RID, sampling_seed=seed
        )
        found: int | None = server.asked["sampling_params"].get("seed")
        return found

    first, rest, other = await seed_of([1, 2], 7), await seed_of([1, 2, 3], 7), await seed_of([1, 2], 8)
    assert len({first, rest, other}) == 3
    assert await seed_of([1, 2], 7) == first
    assert first is not None
    assert 0 <= first < 2**31
    assert await seed_of([1, 2], None) is None


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        (answer([4, 5], weight_versions=None), "cover 0 of 2"),
        (answer([4, 5], weight_versions=[{"version": "v", "start": 1, "end": 2}]), "gap"),
        (answer([4, 5], token_ids=[4, 6]), "different ids"),
        (answer([4, 5], [-1.0, -9999.0]), "that are none"),
        (answer([4, 100]), "vocabulary"),
        (answer([4] * 5), "4 were requested"),
        (answer([4], finish_reason="repetition"), "finish reason 'repetition'"),
        (answer([4]) | {"request_id": "generate-tokens-else"}, "'generate-tokens-else', asked"),
        (answer([4]) | {"choices": []}, "0 answers"),
        (answer([4], logprobs=None) | {"choices": [{"finish_reason": "stop", "token_ids": [4]}]}, "not an answer"),
    ],
)
async def test_an_answer_that_breaks_a_promise_is_refused_whole(broken: dict[str, Any], told: str) -> None:
    with pytest.raises(EngineProtocolError, match=told):
        await generate(Server(broken))


async def test_a_load_takes_the_old_label_away_before_it_touches_a_weight() -> None:
    server = Server(is_paused=True)
    await server.client().load_weights(Path("/w/1"), "job/1/1")
    assert server.calls == [
        "/update_weight_version ''",
        "/collective_rpc",
        "/reset_prefix_cache?reset_running_requests=true",
        "/update_weight_version 'job/1/1'",
    ]


async def test_an_engine_that_runs_is_paused_for_a_load_and_goes_on() -> None:
    server = Server()
    await server.client().load_weights(Path("/w/1"), "job/1/1", flush_cache=False)
    assert server.calls[0] == "/pause?mode=keep&clear_cache=false"
    assert (server.calls[-1], server.label) == ("/resume", "job/1/1")
    assert not any("reset_prefix_cache" in call for call in server.calls)


async def test_a_refused_load_gives_the_old_label_back() -> None:
    server = Server(is_paused=True, loaded=[{"refused": "/w/1 is another model"}] * 2)
    with pytest.raises(EngineRejected, match="another model"):
        await server.client().load_weights(Path("/w/1"), "job/1/1")
    assert server.label == "job/1/0"


@pytest.mark.parametrize("loaded", [500, 400, [], [{"refused": ""}, {"refused": "disk"}]])
async def test_a_load_of_which_nobody_knows_the_end_leaves_no_label(loaded: Any) -> None:
    server = Server(is_paused=True, loaded=loaded)
    with pytest.raises(EngineDirty):
        await server.client().load_weights(Path("/w/1"), "job/1/1")
    assert server.label == ""


@pytest.mark.parametrize(
    ("statuses", "told"),
    [
        ({"/inference/v1/generate": 403}, "--enable-scale-out; missing: /inference/v1/generate"),
        ({"/pause": 404, "/weight_info": 404}, "VLLM_SERVER_DEV_MODE=1; missing: /pause, /weight_info"),
        ({"/collective_rpc": 500}, "--worker-extension-cls gspo_vllm.WeightsFromFolder; missing: gspo_load"),
    ],
)
async def test_what_it_was_started_without_is_named(statuses: dict[str, int], told: str) -> None:
    found = await Server(statuses=statuses).client().capabilities()
    assert not found.names_versions
    assert told in found.advice


async def test_it_says_who_it_is_with_and_without_development_mode() -> None:
    assert await Server().client().info() == EngineInfo(label="job/1/0", model_path="/m/v0")
    assert await Server(statuses={"/weight_info": 404}).client().info() == EngineInfo(label="", model_path="/m/v0")
    capabilities = await Server().client().capabilities()
    assert (capabilities.software, capabilities.names_versions) == ("vLLM 0.32.0", True)
    assert capabilities.is_unguarded  # "engine" is a name that other machines may know
    assert "folder" in capabilities.group_problem


async def test_a_paused_one_and_a_failing_one_are_not_ready() -> None:
    assert await Server().client().is_ready()
    assert not await Server(is_paused=True).client().is_ready()
    assert not await Server(statuses={"/health": 503}).client().is_ready()


async def test_a_server_error_is_an_engine_to_be_asked_again() -> None:
    with pytest.raises(EngineUnavailable):
        await generate(Server(statuses={"/inference/v1/generate": 500}))


def test_its_load_is_that_of_all_its_ranks() -> None:
    assert load_in(METRICS) == EngineLoad(num_running=4, num_waiting=2, num_held_tokens=768, age_s=0.0)
    with pytest.raises(EngineProtocolError, match="log-stats"):
        load_in("# nothing\n")


# what runs inside


def write_model(folder: Path, shapes: dict[str, list[int]]) -> Path:
    folder.mkdir()
    header = json.dumps(
        {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    )
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header.encode())
    return folder


class ParallelLMHead:
    """A head that vLLM has packed for a CPU."""

    cpu_linear: Callable[..., None]

    def __init__(self, reloaded: list[str]) -> None:
        self.cpu_linear = lambda: None
        self.quant_method = self
        self._reloaded = reloaded

    def process_weights_after_loading(self, module: object) -> None:
        assert module is self
        self._reloaded.append("packed again")


class Worker(WeightsFromFolder):
    """As much of vLLM's as the extension calls."""

    def __init__(self, model: Path, *, is_tied: bool = False) -> None:
        self.model_config = self.hf_text_config = self
        self.model, self.tie_word_embeddings = str(model), is_tied
        self.done: list[str] = []

    def get_model(self) -> Any:
        return self

    def modules(self) -> list[object]:
        return [object(), ParallelLMHead(self.done)]

    def reload_weights(self, *, weights_path: str) -> None:
        self.done.append(weights_path)


def test_a_tied_head_is_packed_again_after_the_weights_are_there(tmp_path: Path) -> None:
    start, other = (write_model(tmp_path / name, {"a": [2, 3]}) for name in "xy")
    worker = Worker(start)
    assert worker.gspo_load(str(other)) == {"refused": ""}
    assert worker.done == [str(other), "packed again"]


@pytest.mark.parametrize("shapes", [{"a": [3, 2]}, {}, {"a": [2, 3], "b": [1]}])
def test_a_folder_with_other_tensors_is_refused_before_anything_is_replaced(
    shapes: dict[str, list[int]], tmp_path: Path
) -> None:
    worker = Worker(write_model(tmp_path / "start", {"a": [2, 3]}))
    assert "the engine's model" in worker.gspo_load(str(write_model(tmp_path / "new", shapes)))["refused"]
    assert worker.done == []


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_head_that_the_model_does_not_read_need_not_be_published(is_tied: bool, tmp_path: Path) -> None:
    """Some checkpoints of tied models have it nevertheless."""
    embedding = {"model.embed_tokens.weight": [3, 2]}
    worker = Worker(write_model(tmp_path / "start", embedding | {"lm_head.weight": [3, 2]}), is_tied=is_tied)
    published = write_model(tmp_path / "new", embedding)
    refused = worker.gspo_load(str(published))["refused"]
    assert (refused == "", worker.done != []) == (is_tied, is_tied)
    assert is_tied or "lm_head.weight" in refused


@pytest.mark.parametrize(
    "content", [None, b"", b"\xff" * 8, struct.pack("<Q", 9) + b"{}", struct.pack("<Q", 2) + b"x}"]
)
def test_a_folder_that_cannot_be_read_is_refused(content: bytes | None, tmp_path: Path) -> None:
    worker = Worker(write_model(tmp_path / "start", {"a": [2, 3]}))
    if content is not None:
        (tmp_path / "new").mkdir()
        (tmp_path / "new" / "model.safetensors").write_bytes(content)
    assert "cannot be read" in worker.gspo_load(str(tmp_path / "new"))["refused"]
    assert worker.done == []


def test_shapes_are_read_from_the_headers_of_all_files(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", {"a": [2, 3]})
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    (write_model(tmp_path / "n", {"b": [4]}) / "model.safetensors").rename(folder / "two.safetensors")
    assert shapes_in(folder) == {"a": [2, 3], "b": [4]}


@pytest.mark.parametrize(
    ("configured", "named"), [(None, ""), ("fp8", "fp8"), ("compressed-tensors", "compressed-tensors")]
)
async def test_quantised_weights_are_named(configured: str | None, named: str) -> None:
    """The shape of the answer is that of vLLM's source; no quantised vLLM was run."""
    assert (await Server(quantization=configured).client().capabilities()).quantization == named


async def test_a_server_that_tells_no_configuration_is_not_called_quantised() -> None:
    server = Server(statuses={"/server_info": 404})
    assert (await server.client().capabilities()).quantization == ""
