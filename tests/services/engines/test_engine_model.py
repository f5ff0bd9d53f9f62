"""The engine's own forward is transformers', or the model is refused; and what it remembers stays within bounds."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from services.engine.kv_cache import KVCache, KVPrefix
from services.engine.model import Batch, Decoder, Prefill, UnservableModel
from services.engine.prefix_cache import PrefixCache
from services.engines.protocol import EngineUnavailable
from services.engines.sglang import EngineClient
from tests.services.engines.engine_kit import Models

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def save_model(directory: Path, family: str, **changes: Any) -> Any:
    import transformers

    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms and biases start as ones and zeros, which would hide a mistake
            parameter.data.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return model


def load(directory: Path) -> Decoder:
    return Decoder(directory, device=torch.device("cpu"), dtype=torch.float32, context_length=None)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Qwen3", {"head_dim": 16, "tie_word_embeddings": False}),
        ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True, "num_key_value_heads": 6}),
        ("Qwen2", {"tie_word_embeddings": False}),
        ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
    ],
)
@torch.inference_mode()
def test_mixed_batches_equal_transformers(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    model = save_model(tmp_path, family, **changes)
    decoder = load(tmp_path)
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(0, 97, (length,), generator=generator) for length in (200, 3, 131, 1, 64)]
    cache = decoder.new_cache()
    cache.reserve(5, 256)
    # two requests are computed up to their last token, then all five run in one batch: two decode, one goes on after
    # a prefix, two start
    for row, known in ((0, 199), (1, 2), (2, 100)):
        decoder.forward(batch_of([], [(row, 0, known, sequences[row])]), cache)
    decoding = [(0, 199, sequences[0]), (1, 2, sequences[1])]
    joining = [(2, 100, 131, sequences[2]), (3, 0, 1, sequences[3]), (4, 0, 64, sequences[4])]
    logits = decoder.forward(batch_of(decoding, joining), cache)
    for row, sequence in enumerate(sequences):
        expected = model(sequence[None]).logits[0, -1]
        assert (logits[row] - expected).abs().max() < 1e-4


def batch_of(decoding: list[tuple[int, int, Any]], joining: list[tuple[int, int, int, Any]]) -> Batch:
    ids = [ids[position : position + 1] for _, position, ids in decoding]
    ids += [ids[start:end] for _, start, end, ids in joining]
    positions = [torch.tensor([position]) for _, position, _ in decoding]
    positions += [torch.arange(start, end) for _, start, end, _ in joining]
    return Batch(
        torch.cat(ids),
        torch.cat(positions),
        num_decode=len(decoding),
        longest=max((position + 1 for _, position, _ in decoding), default=0),
        prefills=[Prefill(row, start, end) for row, start, end, _ in joining],
    )


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
        ("Llama", {"hidden_act": "gelu"}),
        ("Llama", {"attention_bias": True}),
        ("GPTNeoX", {}),
    ],
)
def test_a_model_that_is_not_understood_is_refused(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    save_model(tmp_path, family, **changes)
    with pytest.raises(UnservableModel):
        load(tmp_path)


def test_a_forward_that_is_off_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path, "Qwen3", head_dim=16)
    tables = Decoder._rope_tables

    def shifted(decoder: Decoder, reference: Any) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = tables(decoder, reference)
        return cos, sin.roll(1, 0)

    monkeypatch.setattr(Decoder, "_rope_tables", shifted)
    with pytest.raises(UnservableModel, match="off those of transformers"):
        load(tmp_path)


async def test_numbers_that_are_not_finite_fail_the_request_and_leave_nothing_behind(
    engine: EngineClient, models: Models, tmp_path: Path
) -> None:
    tensors = load_file(models.paths[0] / "model.safetensors")
    tensors["model.layers.0.input_layernorm.weight"] *= 1e38
    tensors["model.layers.0.self_attn.v_proj.weight"] *= 1e38
    save_file(tensors, tmp_path / "model.safetensors")
    await engine.load_weights(tmp_path, "job/0/1")
    calls = [engine.generate([1] * 60, max_new_tokens=5, temperature=1.0, stop_token_ids=[]) for _ in range(3)]
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(outcome, EngineUnavailable)
        assert "non-finite" in str(outcome)
    await engine.load_weights(models.paths[0], "job/0/2")
    # short requests beside a long one: what lies behind their own tokens is read, and masked
    prompts = [[7], [8], [9] * 100]
    answers = await asyncio.gather(
        *(engine.generate(prompt, max_new_tokens=100, temperature=1.0, stop_token_ids=[]) for prompt in prompts)
    )
    for prompt, generation in zip(prompts, answers, strict=True):
        assert models.deviation(0, prompt, generation, 1.0) < 1e-4


def prefix_of(length: int) -> KVPrefix:
    return KVPrefix(torch.zeros(1, 1, 4, length), torch.zeros(1, 1, length, 4))


def tokens_of(*parts: tuple[int, int]) -> np.ndarray[Any, np.dtype[np.int32]]:
    """(id, how often) in sequence."""
    return np.concatenate([np.full(count, token, dtype=np.int32) for token, count in parts])


def test_the_longest_common_prefix_wins_and_the_last_token_is_always_computed() -> None:
    cache = PrefixCache(budget_bytes=10**6)
    for tail in ((2, 5), (2, 300), (3, 300)):
        tokens = tokens_of((1, 10), tail)
        entry = cache.start(tokens, None, row=0)
        assert cache.match(tokens, None)[1] < len(tokens) - 1  # not ready yet
        cache.ready(entry)
        cache.finish(entry, tokens, prefix_of(len(tokens)))
    for wanted, common in (
        (tokens_of((1, 10), (2, 100), (9, 1)), 110),
        (tokens_of((1, 10), (3, 300)), 309),
        (tokens_of((1, 10), (3, 400)), 310),
        (tokens_of((1, 12)), 10),
        (tokens_of((4, 50)), 0),
        (tokens_of((1, 5), (2, 50)), 0),  # too short to be worth copying
    ):
        found, length, _ = cache.match(wanted, None)
        assert length == common
        assert (found is None) == (common == 0)
    assert cache.match(tokens_of((1, 30)), "another space")[1] == 0


def test_finished_prefixes_stay_within_their_budget_and_the_oldest_go_first() -> None:
    size = prefix_of(100).size_bytes
    cache = PrefixCache(budget_bytes=3 * size)
    for token in range(5):
        entry = cache.start(tokens_of((token, 100)), None, row=0)
        cache.ready(entry)
        cache.finish(entry, tokens_of((token, 100)), prefix_of(100))
        cache.match(tokens_of((0, 100)), None)  # use keeps the first one alive
    kept = [token for token in range(5) if cache.match(tokens_of((token, 101)), None)[1]]
    assert kept == [0, 3, 4]
    cache.clear()
    assert cache.match(tokens_of((0, 100)), None)[1] == 0


def test_rows_keep_their_content_when_the_cache_grows_and_moves() -> None:
    cache = KVCache(2, 1, 4, torch.float32, torch.device("cpu"))
    cache.reserve(2, 10)
    cache.keys[:, 1, :, :, :10] = torch.arange(10.0)
    cache.values[:, 1, :, :10] = torch.arange(10.0)[:, None]
    cache.reserve(20, 1000)
    cache.move(1, 15, 10)
    saved = cache.save(15, 8)
    cache.load(3, saved, 5)
    assert torch.equal(cache.keys[0, 3, 0, 0, :6], torch.tensor([0.0, 1, 2, 3, 4, 0]))
    assert torch.equal(cache.values[1, 15, 0, :11, 3], torch.tensor([*range(10), 0], dtype=torch.float32))
    cache.erase(15)
    assert not cache.keys[:, 15].any()
    assert saved.keys[..., 7].eq(7).all()
