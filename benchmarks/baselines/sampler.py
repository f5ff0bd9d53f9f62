"""Sampling for many episodes at once under weights of a chosen version: the embedded engine's model without its server.

Rule: what a token is drawn with follows from the seed of its episode and its place in it alone. The log-prob is that of
the version that drew it, computed with this version's weights for the whole prefix, as an engine does that computes
requests anew under new weights (``weight_sync: retract``).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from services.engine.checkpoint import read_checkpoint
from services.engine.kv_cache import KVPrefix
from services.engine.model import Batch, Decoder, Prefill
from services.engine.sampling import sample, uniforms


@dataclass(frozen=True)
class Request:
    ids: Sequence[int]
    max_new_tokens: int
    seed: int
    num_drawn: int
    """Tokens that the episode has sampled before."""


@dataclass
class Answer:
    ids: list[int]
    logprobs: list[float]

    def is_over(self, request: Request, stop_ids: Collection[int]) -> bool:
        return len(self.ids) >= request.max_new_tokens or (bool(self.ids) and self.ids[-1] in stop_ids)


class Sampler(Protocol):
    """Holds the weights of several versions."""

    def add(self, version: int, directory: Path) -> None: ...

    def forget_before(self, version: int) -> None: ...

    def generate(self, version: int, requests: Sequence[Request], stop_ids: Collection[int]) -> list[Answer]: ...

    def score(self, version: int, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """The log-prob of each token but the first."""
        ...


class DenseSampler:
    """The embedded engine's decoder."""

    def __init__(self, model_dir: Path, context_length: int) -> None:
        self._decoder = Decoder(
            model_dir, device=torch.device("cpu"), dtype=torch.float32, context_length=context_length
        )
        self._shapes = {name: tensor.shape for name, tensor in self._decoder.parameters.items()}
        self._versions: dict[int, dict[str, Tensor]] = {}
        self._loaded = -1
        self._cache = self._decoder.new_cache()

    def add(self, version: int, directory: Path) -> None:
        self._versions[version] = read_checkpoint(directory, self._shapes, self._decoder.tied)

    def forget_before(self, version: int) -> None:
        self._versions = {one: tensors for one, tensors in self._versions.items() if one >= version}

    @torch.inference_mode()
    def generate(self, version: int, requests: Sequence[Request], stop_ids: Collection[int]) -> list[Answer]:
        self._load(version)
        answers = [Answer([], []) for _ in requests]
        longest = max(len(one.ids) + one.max_new_tokens for one in requests)
        self._cache.reserve(len(requests), longest)
        rows = list(range(len(requests)))
        """The request of each row of the cache."""
        logits_B = self._prefill([list(one.ids) for one in requests])
        while True:
            draw(logits_B, [requests[row] for row in rows], [answers[row] for row in rows])
            rows = self._without_finished(rows, requests, answers, stop_ids)
            if not rows:
                return answers
            logits_B = self._decode(rows, requests, answers)

    @torch.inference_mode()
    def score(self, version: int, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        self._load(version)
        self._cache.reserve(len(sequences), max(map(len, sequences)))
        found = []
        start = max(0, self._share_prefix([list(ids) for ids in sequences]) - 1)
        head = self._decoder.score(sequences[0][: start + 1])
        for row, ids in enumerate(sequences):
            fresh = torch.tensor(ids[start:])
            batch = Batch(fresh, torch.arange(start, len(ids)), 0, 0, [Prefill(row, start, len(ids))])
            logprobs_N = torch.log_softmax(self._decoder.forward(batch, self._cache, every=True)[:-1], dim=-1)
            found.append([*head, *logprobs_N.gather(1, fresh[1:, None]).squeeze(1).tolist()])
        return found

    def _load(self, version: int) -> None:
        if version != self._loaded:
            self._decoder.load(self._versions[version])
            self._loaded = version

    def _prefill(self, contexts: Sequence[list[int]]) -> Tensor:
        """Logits after the last token of each, which then lies in the row of the same number."""
        start = self._share_prefix(contexts)
        ids = [token for context in contexts for token in context[start:]]
        positions = [place for context in contexts for place in range(start, len(context))]
        prefills = [Prefill(row, start, len(context)) for row, context in enumerate(contexts)]
        return self._decoder.forward(Batch(torch.tensor(ids), torch.tensor(positions), 0, 0, prefills), self._cache)

    def _share_prefix(self, contexts: Sequence[list[int]]) -> int:
        """Computes once what all begin with, into every row; its length."""
        first, last = min(contexts), max(contexts)
        length = min(map(len, contexts)) - 1
        shared = next((place for place in range(length) if first[place] != last[place]), length)
        if shared < 1:
            return 0
        batch = Batch(torch.tensor(first[:shared]), torch.arange(shared), 0, 0, [Prefill(0, 0, shared)])
        self._decoder.forward(batch, self._cache)
        prefix: KVPrefix = self._cache.save(0, shared)
        for row in range(1, len(contexts)):
            self._cache.load(row, prefix, shared)
        return shared

    def _decode(self, rows: Sequence[int], requests: Sequence[Request], answers: Sequence[Answer]) -> Tensor:
        last = [answers[row].ids[-1] for row in rows]
        positions = [len(requests[row].ids) + len(answers[row].ids) - 1 for row in rows]
        batch = Batch(torch.tensor(last), torch.tensor(positions), len(rows), max(positions) + 1, [])
        return self._decoder.forward(batch, self._cache)

    def _without_finished(
        self, rows: list[int], requests: Sequence[Request], answers: Sequence[Answer], stop_ids: Collection[int]
    ) -> list[int]:
        """Closes the gaps that finished requests leave in the cache."""
        going = list(rows)
        place = 0
        while place < len(going):
            if not answers[going[place]].is_over(requests[going[place]], stop_ids):
                place += 1
                continue
            moved = going.pop()
            if place < len(going):
                going[place] = moved
                length = len(requests[moved].ids) + len(answers[moved].ids)
                self._cache.move(len(going), place, length)
        return going


class MixtureSampler:
    """transformers' own forward, for models that the embedded engine does not know; slower."""

    def __init__(self, padding_id: int) -> None:
        self._padding_id = padding_id
        self._versions: dict[int, Any] = {}

    def add(self, version: int, directory: Path) -> None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
        self._versions[version] = model.eval()

    def forget_before(self, version: int) -> None:
        self._versions = {one: model for one, model in self._versions.items() if one >= version}

    @torch.inference_mode()
    def generate(self, version: int, requests: Sequence[Request], stop_ids: Collection[int]) -> list[Answer]:
        answers = [Answer([], []) for _ in requests]
        longest = max(len(one.ids) for one in requests)
        padded = [[self._padding_id] * (longest - len(one.ids)) + list(one.ids) for one in requests]
        new_BT = torch.tensor(padded)
        mask_BT = torch.tensor([[0] * (longest - len(one.ids)) + [1] * len(one.ids) for one in requests])
        positions_BT = (mask_BT.cumsum(-1) - 1).clamp(min=0)
        cache = None
        going = list(range(len(requests)))
        while True:
            output = self._versions[version](
                input_ids=new_BT,
                attention_mask=mask_BT,
                position_ids=positions_BT,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = output.past_key_values
            logits_B = output.logits[:, -1]
            draw(logits_B[going], [requests[row] for row in going], [answers[row] for row in going])
            going = [row for row in going if not answers[row].is_over(requests[row], stop_ids)]
            if not going:
                return answers
            new_BT = torch.tensor([[answer.ids[-1]] for answer in answers])
            mask_BT = torch.cat([mask_BT, mask_BT.new_ones(len(requests), 1)], dim=1)
            positions_BT = positions_BT[:, -1:] + 1

    @torch.inference_mode()
    def score(self, version: int, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        found = []
        for ids in sequences:
            ids_T = torch.tensor(ids)
            logprobs_T = torch.log_softmax(self._versions[version](input_ids=ids_T[None]).logits[0, :-1], dim=-1)
            found.append(logprobs_T.gather(1, ids_T[1:, None]).squeeze(1).tolist())
        return found


def draw(logits_B: Tensor, requests: Sequence[Request], answers: Sequence[Answer]) -> None:
    """Adds one token to each answer, at temperature 1."""
    seeds = np.array([one.seed for one in requests], dtype=np.uint64)
    places = np.array([r.num_drawn + len(a.ids) for r, a in zip(requests, answers, strict=True)], dtype=np.uint64)
    ids_B, logprobs_B = sample(logits_B, torch.ones(len(requests)), torch.from_numpy(uniforms(seeds, places)))
    for answer, token, logprob in zip(answers, ids_B.tolist(), logprobs_B.tolist(), strict=True):
        answer.ids.append(token)
        answer.logprobs.append(logprob)
