"""One forward over ragged requests: every running request adds one token, every new one the rest of its prompt.

Rule: the numbers are those of transformers. Its implementation loads the checkpoint and is compared with this one
before the engine serves; a model that this forward does not reproduce is refused, not served approximately.
It differs in speed: projections are fused and stored transposed, the tokens of all requests are packed without
padding, and a decode step reads the cache in place. Covers Qwen3, Qwen2 and Llama shapes; others need another engine.

Shapes by suffix (leading dimension): N packed tokens, B requests, T tokens of one request. Behind it come heads, head
dimension, hidden or vocabulary size, as the code shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from services.engine.kv_cache import KVCache

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# Queries of one prompt that attend at a time: bounds the mask of a long prompt.
_QUERY_CHUNK = 1024
_STATIC_ROPE = {"default", "linear", "llama3", "yarn"}
_MAX_DEVIATION = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.05}


class UnservableModel(Exception):
    """The embedded engine cannot serve this model; use another kind of engine."""


class Prefill(NamedTuple):
    """Tokens ``start..end`` of the request in ``row`` are new; those before are in the cache."""

    row: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Batch:
    """The work of one forward: one token for each of the rows 0..num_decode-1, then the prefills."""

    ids_N: Tensor
    positions_N: Tensor
    num_decode: int
    longest: int
    """Tokens of the longest decoding request, the new one included."""
    prefills: Sequence[Prefill]


@dataclass(slots=True)
class _Layer:
    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    qk_norm: Tensor | None = None
    """``q_norm`` and ``k_norm`` spread over the heads; follows them."""


class Decoder:
    """The weights and the forward. ``parameters`` are views by Hugging Face name: writing to them changes the model."""

    def __init__(
        self, model_dir: Path, *, device: torch.device, dtype: torch.dtype, context_length: int | None
    ) -> None:
        from transformers import AutoModelForCausalLM

        reference = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, local_files_only=True)
        reference = reference.eval().to(device)
        self.config = config = reference.config
        _check_config(config)
        self.device, self.dtype = device, dtype
        self.vocab_size: int = config.vocab_size
        self.context_length: int = min(context_length or config.max_position_embeddings, config.max_position_embeddings)
        self.num_heads: int = config.num_attention_heads
        self.num_kv_heads: int = config.num_key_value_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // self.num_heads
        self._eps: float = config.rms_norm_eps
        self._scale = self.head_dim**-0.5
        self.parameters: dict[str, Tensor] = {}
        self._take_weights({name: tensor.detach() for name, tensor in reference.state_dict().items()})
        with torch.inference_mode():
            self._cos_T, self._sin_T = self._rope_tables(reference)
            self._derive()
            self._compare(reference)

    @property
    def tied(self) -> frozenset[str]:
        """Parameters that a checkpoint may leave out."""
        return frozenset({"lm_head.weight"}) if self.config.tie_word_embeddings else frozenset()

    def new_cache(self) -> KVCache:
        return KVCache(len(self._layers), self.num_kv_heads, self.head_dim, self.dtype, self.device)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Replaces the weights in place. The tensors were checked by ``read_checkpoint``."""
        for name, tensor in tensors.items():
            self.parameters[name].copy_(tensor)
        self._derive()

    def score(self, ids: Sequence[int]) -> list[float]:
        """The log-prob of each id but the first, given those before it, at temperature 1."""
        length = len(ids)
        ids_N = torch.tensor(ids, device=self.device)
        cache = self.new_cache()
        cache.reserve(1, length)
        batch = Batch(ids_N, torch.arange(length, device=self.device), 0, 0, [Prefill(0, 0, length)])
        logprobs_N = torch.log_softmax(self.forward(batch, cache, every=True)[:-1].float(), dim=-1)
        found: list[float] = logprobs_N.gather(1, ids_N[1:, None]).squeeze(1).tolist()
        return found

    def forward(self, batch: Batch, cache: KVCache, *, every: bool = False) -> Tensor:
        """Logits (B, V) after the last token of each row, or after ``every`` new token (N, V); extends the cache."""
        x_N = F.embedding(batch.ids_N, self._embedding)
        cos_N, sin_N = self._cos_T[batch.positions_N, None], self._sin_T[batch.positions_N, None]
        attention = _Attention(self, batch, cache)
        num_qk = self.num_heads + self.num_kv_heads
        for index, layer in enumerate(self._layers):
            h_N = self._norm(x_N, layer.input_norm)
            qkv_N = h_N @ layer.qkv if layer.qkv_bias is None else torch.addmm(layer.qkv_bias, h_N, layer.qkv)
            heads_N = qkv_N.view(len(qkv_N), -1, self.head_dim)
            qk_N, v_N = heads_N[:, :num_qk], heads_N[:, num_qk:]
            if layer.qk_norm is not None:
                qk_N = self._norm(qk_N, layer.qk_norm)
            qk_N = torch.addcmul(qk_N * cos_N, qk_N.roll(self.head_dim // 2, -1), sin_N)
            mixed_N = attention(index, qk_N[:, : self.num_heads], qk_N[:, self.num_heads :], v_N)
            x_N = torch.addmm(x_N, mixed_N, layer.output)
            gate_N, up_N = (self._norm(x_N, layer.mlp_norm) @ layer.gate_up).chunk(2, dim=-1)
            x_N = torch.addmm(x_N, F.silu(gate_N) * up_N, layer.down)
        wanted = x_N if every else attention.last_of_each(x_N)
        return F.linear(self._norm(wanted, self._final_norm), self._head)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        x32 = x.float()
        mean_square: Tensor = torch.linalg.vecdot(x32, x32).unsqueeze(-1).mul_(1 / x.shape[-1])
        return (x32 * mean_square.add_(self._eps).rsqrt_()).to(x.dtype).mul_(weight)

    def _take_weights(self, state: dict[str, Tensor]) -> None:
        """Copies the weights into fused, transposed tensors and registers a view for each original name."""

        def take(*names: str) -> Tensor:
            if missing := [name for name in names if name not in state]:
                raise UnservableModel(f"{self.config.model_type} has no {missing}")
            tensors = [state.pop(name) for name in names]
            sizes = [len(tensor) for tensor in tensors]
            if tensors[0].dim() == 1:
                fused = torch.cat(tensors)
                views = list(fused.split_with_sizes(sizes))
            else:
                fused = torch.cat(tensors).t().contiguous()
                views = [view.t() for view in fused.split_with_sizes(sizes, dim=1)]
            self.parameters.update(zip(names, views, strict=True))
            return fused

        def take_if_present(*names: str) -> Tensor | None:
            return take(*names) if names[0] in state else None

        self._embedding = state.pop("model.embed_tokens.weight").clone()
        self.parameters["model.embed_tokens.weight"] = self._embedding
        head = state.pop("lm_head.weight")
        self._head = self._embedding if self.config.tie_word_embeddings else head.clone()
        self.parameters["lm_head.weight"] = self._head
        self._final_norm = take("model.norm.weight")
        self._layers: list[_Layer] = []
        for index in range(self.config.num_hidden_layers):
            layer, attention = f"model.layers.{index}", f"model.layers.{index}.self_attn"
            self._layers.append(
                _Layer(
                    input_norm=take(f"{layer}.input_layernorm.weight"),
                    qkv=take(*(f"{attention}.{name}_proj.weight" for name in "qkv")),
                    qkv_bias=take_if_present(*(f"{attention}.{name}_proj.bias" for name in "qkv")),
                    q_norm=take_if_present(f"{attention}.q_norm.weight"),
                    k_norm=take_if_present(f"{attention}.k_norm.weight"),
                    output=take(f"{attention}.o_proj.weight"),
                    mlp_norm=take(f"{layer}.post_attention_layernorm.weight"),
                    gate_up=take(f"{layer}.mlp.gate_proj.weight", f"{layer}.mlp.up_proj.weight"),
                    down=take(f"{layer}.mlp.down_proj.weight"),
                )
            )
        if state:
            raise UnservableModel(f"{self.config.model_type} has unknown weights: {sorted(state)[:3]}")

    def _derive(self) -> None:
        for layer in self._layers:
            if layer.q_norm is not None and layer.k_norm is not None:
                spread = (layer.q_norm.expand(self.num_heads, -1), layer.k_norm.expand(self.num_kv_heads, -1))
                layer.qk_norm = torch.cat(spread)

    def _rope_tables(self, reference: PreTrainedModel) -> tuple[Tensor, Tensor]:
        """cos and sin for every position; the sign of rotate_half is folded into sin, so that a roll replaces it."""
        positions = torch.arange(self.context_length, device=self.device)[None]
        cos, sin = reference.model.rotary_emb(self._embedding, positions)
        half = self.head_dim // 2
        return cos[0], torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)

    def _compare(self, reference: PreTrainedModel) -> None:
        """Prefill and decode of this forward against transformers on arbitrary ids."""
        length = min(24, self.context_length)
        ids = (torch.arange(length, device=self.device) * 7919 + 5) % self.vocab_size
        positions = torch.arange(length, device=self.device)
        cache = self.new_cache()
        cache.reserve(1, length)
        self.forward(Batch(ids[:-1], positions[:-1], 0, 0, [Prefill(0, 0, length - 1)]), cache)
        ours = self.forward(Batch(ids[-1:], positions[-1:], 1, length, []), cache)[0]
        theirs = reference(ids[None]).logits[0, -1]
        deviation = (ours.float().log_softmax(-1) - theirs.float().log_softmax(-1)).abs().max().item()
        if not deviation <= _MAX_DEVIATION.get(self.dtype, 0.3):
            raise UnservableModel(f"{self.config.model_type}: log-probs are {deviation:.2g} off those of transformers")


def _check_config(config: PretrainedConfig) -> None:
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    known = {
        "rms_norm_eps": hasattr(config, "rms_norm_eps"),
        "num_key_value_heads": hasattr(config, "num_key_value_heads"),
        "hidden_act": getattr(config, "hidden_act", None) == "silu",
        "rope_type": rope in _STATIC_ROPE,
        "use_sliding_window": not getattr(config, "use_sliding_window", False),
    }
    if strange := [name for name, is_known in known.items() if not is_known]:
        raise UnservableModel(f"{config.model_type}: unsupported: {', '.join(strange)}")


class _Chunk(NamedTuple):
    """Consecutive new tokens of one prompt, which attend together."""

    new: slice
    """Where they lie among the packed tokens."""
    row: int
    num_keys: int
    bias: Tensor


class _Attention:
    """What all layers of one forward share: masks, and where the tokens of each request lie."""

    def __init__(self, decoder: Decoder, batch: Batch, cache: KVCache) -> None:
        self._batch, self._cache = batch, cache
        self._scale = decoder._scale
        self._num_kv_heads = decoder.num_kv_heads
        self._group = decoder.num_heads // decoder.num_kv_heads
        self._dtype, self._device = decoder.dtype, decoder.device
        self._positions_B = batch.positions_N[: batch.num_decode]
        self._rows_B = torch.arange(batch.num_decode, device=self._device)
        bias_B = self._bias(self._positions_B, batch.longest)
        self._decode_bias = bias_B.repeat_interleave(self._num_kv_heads, dim=0)[:, None]
        self._chunks = list(self._cut_prefills())

    def _cut_prefills(self) -> Iterator[_Chunk]:
        offset = self._batch.num_decode
        for row, start, end in self._batch.prefills:
            for first in range(start, end, _QUERY_CHUNK):
                last = min(first + _QUERY_CHUNK, end)
                new = slice(offset + first - start, offset + last - start)
                yield _Chunk(new, row, last, self._bias(self._batch.positions_N[new], last))
            offset += end - start

    def _bias(self, positions: Tensor, num_keys: int) -> Tensor:
        """0 for the keys that a query at each position may see, -inf for those behind it."""
        future = torch.arange(num_keys, device=self._device) > positions[:, None]
        return torch.zeros(future.shape, dtype=self._dtype, device=self._device).masked_fill_(future, -torch.inf)

    def __call__(self, layer: int, q_N: Tensor, k_N: Tensor, v_N: Tensor) -> Tensor:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        self._store(keys, values, k_N, v_N)
        mixed = []
        if num_decode := self._batch.num_decode:
            mixed.append(self._decode(q_N[:num_decode], keys, values))
        for new, row, num_keys, bias in self._chunks:
            mixed.append(self._prefill(q_N[new], keys[row, :, :, :num_keys], values[row, :, :num_keys], bias))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    def _store(self, keys: Tensor, values: Tensor, k_N: Tensor, v_N: Tensor) -> None:
        offset = self._batch.num_decode
        if offset:
            keys[self._rows_B, :, :, self._positions_B] = k_N[:offset]
            values[self._rows_B, :, self._positions_B] = v_N[:offset]
        for row, start, end in self._batch.prefills:
            new = slice(offset, offset := offset + end - start)
            keys[row, :, :, start:end] = k_N[new].permute(1, 2, 0)
            values[row, :, start:end] = v_N[new].transpose(0, 1)

    def last_of_each(self, x_N: Tensor) -> Tensor:
        """The rows of ``x_N`` that belong to the last token of each request."""
        if not self._batch.prefills:
            return x_N
        ends, offset = list(range(self._batch.num_decode)), self._batch.num_decode
        for _, start, end in self._batch.prefills:
            offset += end - start
            ends.append(offset - 1)
        return x_N[torch.tensor(ends, device=x_N.device)]

    def _decode(self, q_B: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        num, heads, head_dim = q_B.shape
        longest = self._batch.longest
        q = q_B.reshape(num * self._num_kv_heads, self._group, head_dim)
        scores = torch.baddbmm(self._decode_bias, q, keys[:num, :, :, :longest].flatten(0, 1), alpha=self._scale)
        return torch.bmm(_softmax(scores), values[:num, :, :longest].flatten(0, 1)).view(num, heads * head_dim)

    def _prefill(self, q_T: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        mixed = F.scaled_dot_product_attention(
            q_T.transpose(0, 1)[None],
            keys.transpose(1, 2)[None].contiguous(),
            values[None],
            attn_mask=bias,
            scale=self._scale,
            enable_gqa=True,
        )
        return mixed[0].transpose(0, 1).flatten(1)


def _softmax(scores: Tensor) -> Tensor:
    return torch.softmax(scores, -1, dtype=torch.float32).to(scores.dtype)
