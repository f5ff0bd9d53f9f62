"""The engine's end of a process group: what does not come, comes late or does not fit changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from services.engines import process_group
from services.engines.process_group import ProcessGroup
from services.engines.protocol import EngineRejected
from services.engines.sglang import EngineClient
from services.engines.weight_buckets import buckets_in
from services.engines.weight_group import WeightGroup
from services.process.ports import free_port
from tests.services.engines.engine_kit import Models

TOLERANCE = 1e-4
PROMPT = [10, 20, 30, 40]


async def sender(engine: EngineClient) -> tuple[ProcessGroup, str]:
    """The trainer's end of a group, in which an update has begun."""
    port = free_port()
    name = f"by-hand-{port}"
    place: dict[str, Any] = {"host": "127.0.0.1", "port": port, "world_size": 2, "name": name, "timeout_s": 60.0}
    group, _ = await asyncio.gather(
        ProcessGroup.join(rank=0, backend="gloo", **place), engine.join_weight_group(rank=1, backend="gloo", **place)
    )
    with contextlib.suppress(EngineRejected):
        await engine.end_weight_update()
    await engine.begin_weight_update()
    return group, name


async def test_tensors_that_stop_coming_leave_the_old_weights_and_never_come_late(
    engine: EngineClient, models: Models
) -> None:
    """The sender gives up in the middle, the engine is loaded from disk, and then the rest arrives."""
    group, name = await sender(engine)
    first, *middle, last = buckets_in(models.paths[1], max_bytes=2**14)
    assert middle
    told = asyncio.create_task(engine.receive_weights(first.tensors, group=name, label=None, flush_cache=False))
    await group.broadcast([first.data])
    await told
    answer = await engine.generate(PROMPT, max_new_tokens=20, temperature=1.0, stop_token_ids=[])
    assert [span.label for span in answer.spans] == ["default"]
    assert models.deviation(0, PROMPT, answer, 1.0) < TOLERANCE
    await engine.load_weights(models.paths[2], "job/1/2")
    told = asyncio.create_task(engine.receive_weights(last.tensors, group=name, label="job/1/1", flush_cache=True))
    await group.broadcast([last.data])
    with pytest.raises(EngineRejected, match="in the meantime"):
        await told
    answer = await engine.generate(PROMPT, max_new_tokens=20, temperature=1.0, stop_token_ids=[])
    assert [span.label for span in answer.spans] == ["job/1/2"]
    assert models.deviation(2, PROMPT, answer, 1.0) < TOLERANCE
    await engine.leave_weight_group(name)
    group.close()


async def test_tensors_that_do_not_fit_are_refused_before_any_is_sent(engine: EngineClient, models: Models) -> None:
    group, name = await sender(engine)
    norm = "model.norm.weight"
    for tensor, problem in (
        (("nobody.weight", "float32", [2]), "no tensor nobody"),
        ((norm, "float32", [2]), "has shape"),
        ((norm, "int64", [64]), "not floating point"),
    ):
        with pytest.raises(EngineRejected, match=problem):
            await engine.receive_weights([tensor], group=name, label="job/1/1", flush_cache=True)
    told = asyncio.create_task(
        engine.receive_weights([(norm, "float32", [64])], group=name, label="job/1/1", flush_cache=True)
    )
    await group.broadcast([torch.full((64,), torch.nan).view(torch.uint8)])
    with pytest.raises(EngineRejected, match="finite"):
        await told
    with pytest.raises(EngineRejected, match="no group"):
        await engine.receive_weights([(norm, "float32", [64])], group="nobody", label="job/1/1", flush_cache=True)
    answer = await engine.generate(PROMPT, max_new_tokens=20, temperature=1.0, stop_token_ids=[])
    assert models.deviation(0, PROMPT, answer, 1.0) < TOLERANCE
    await engine.leave_weight_group(name)
    group.close()


async def test_an_update_that_ends_without_a_version_changes_nothing_and_says_so(
    engine: EngineClient, models: Models
) -> None:
    group, name = await sender(engine)
    first, *_ = buckets_in(models.paths[1], max_bytes=2**14)
    told = asyncio.create_task(engine.receive_weights(first.tensors, group=name, label=None, flush_cache=True))
    await group.broadcast([first.data])
    await told
    with pytest.raises(EngineRejected, match="the weights are as before"):
        await engine.end_weight_update()
    answer = await engine.generate(PROMPT, max_new_tokens=20, temperature=1.0, stop_token_ids=[])
    assert [span.label for span in answer.spans] == ["default"]
    assert models.deviation(0, PROMPT, answer, 1.0) < TOLERANCE
    await engine.leave_weight_group(name)
    group.close()


async def test_tensors_that_are_sent_one_by_one_are_taken_as_well(engine: EngineClient, models: Models) -> None:
    """As older senders do, and as the protocol has it where no format is named."""
    group, name = await sender(engine)
    tensors = load_file(models.paths[1] / "model.safetensors")
    body = {
        "names": list(tensors),
        "dtypes": ["float32"] * len(tensors),
        "shapes": [list(one.shape) for one in tensors.values()],
        "group_name": name,
        "weight_version": "job/1/1",
    }
    told = asyncio.create_task(engine._call("POST", "/update_weights_from_distributed", body, admin=True))
    await group.broadcast(tensors.values())
    await told
    await engine.end_weight_update()
    answer = await engine.generate(PROMPT, max_new_tokens=20, temperature=1.0, stop_token_ids=[])
    assert [span.label for span in answer.spans] == ["job/1/1"]
    assert models.deviation(1, PROMPT, answer, 1.0) < TOLERANCE
    await engine.leave_weight_group(name)
    group.close()


async def test_a_sender_on_a_gpu_reaches_an_engine_without_one(engine: EngineClient, models: Models) -> None:
    await engine.pause("retract")
    group = await WeightGroup.join([engine], device="cuda:0")
    assert await group.send(buckets_in(models.paths[1], max_bytes=2**14), "job/1/1") is None
    await group.close()
    await engine.resume()
    answer = await engine.generate(PROMPT, max_new_tokens=20, temperature=1.0, stop_token_ids=[])
    assert [span.label for span in answer.spans] == ["job/1/1"]
    assert models.deviation(1, PROMPT, answer, 1.0) < TOLERANCE


@pytest.mark.parametrize(
    ("others", "backend"),
    [
        (["another"], "nccl"),
        (["another", "third", None], "nccl"),
        ([None], "nccl"),
        (["own"], "gloo"),
        (["another", "another"], "gloo"),
        (["another", ""], "gloo"),
    ],
)
def test_nccl_joins_different_gpus(monkeypatch: pytest.MonkeyPatch, others: list[str | None], backend: str) -> None:
    monkeypatch.setattr(process_group, "gpu_uuid", lambda _: "own")
    assert process_group.backend_for("cuda:0", others) == backend
    assert process_group.backend_for("cpu", others) == "gloo"
