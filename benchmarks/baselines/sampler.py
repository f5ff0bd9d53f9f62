"""Sampling for many episodes at once under weights of a chosen version: the embedded engine's model without its server.

Rule: what a token is drawn with follows from the seed of its episode and its place in it alone. The log-prob is that of
the version that drew it, computed with this version's weights for the whole prefix, as an engine does that computes
requests anew under new weights (``weight_sync: retract``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
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
    temperature: float = 1.0


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
        """The log-prob of each token but the first, at temperature 1."""
        ...


@dataclass(frozen=True)
class _Kept:
    """What an episode had computed when it last sampled."""

    version: int
    ids: Sequence[int]
    prefix: KVPrefix


class DenseSampler:
    """The embedded engine's decoder. ``num_kept``: of so many episodes a next turn under the same weights computes only
    what is new."""

    def __init__(self, model_dir: Path, context_length: int, num_kept: int = 0) -> None:
        self._decoder = Decoder(
            model_dir, device=torch.device("cpu"), dtype=torch.float32, context_length=context_length
        )
        self._shapes = {name: tensor.shape for name, tensor in self._decoder.parameters.items()}
        self._versions: dict[int, dict[str, Tensor]] = {}
        self._loaded = -1
        self._cache = self._decoder.new_cache()
        self._num_kept = num_kept
        self._kept: OrderedDict[int, _Kept] = OrderedDict()

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
        logits_B = self._prefill(requests)
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
        start = max(0, self._share_prefix(dict(enumerate(map(list, sequences)))) - 1)
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

    def _prefill(self, requests: Sequence[Request]) -> Tensor:
        """Logits after the last token of each, which then lies in the row of the same number."""
        contexts = [list(one.ids) for one in requests]
        starts = [self._recall(row, one) for row, one in enumerate(requests)]
        fresh = {row: context for row, context in enumerate(contexts) if not starts[row]}
        shared = self._share_prefix(fresh) if fresh else 0
        spans = [
            (row, start or shared, len(context))
            for row, (start, context) in enumerate(zip(starts, contexts, strict=True))
        ]
        ids = [token for row, start, end in spans for token in contexts[row][start:end]]
        positions = [place for _, start, end in spans for place in range(start, end)]
        prefills = [Prefill(*span) for span in spans]
        return self._decoder.forward(Batch(torch.tensor(ids), torch.tensor(positions), 0, 0, prefills), self._cache)

    def _recall(self, row: int, request: Request) -> int:
        """Puts what its episode has computed under these weights into its row; of so many tokens."""
        kept = self._kept.pop(request.seed, None)
        if kept is None or kept.version != self._loaded or len(kept.ids) >= len(request.ids):
            return 0
        if list(request.ids[: len(kept.ids)]) != kept.ids:
            return 0
        self._cache.load(row, kept.prefix, len(kept.ids))
        return len(kept.ids)

    def _keep(self, row: int, request: Request, answer: Answer) -> None:
        """All but the token that was drawn last, which no forward has seen."""
        if not self._num_kept:
            return
        ids = [*request.ids, *answer.ids[:-1]]
        self._kept[request.seed] = _Kept(self._loaded, ids, self._cache.save(row, len(ids)))
        if len(self._kept) > self._num_kept:
            self._kept.popitem(last=False)

    def _share_prefix(self, contexts: Mapping[int, list[int]]) -> int:
        """Computes once what all begin with, into the row of each; its length."""
        first, last = min(contexts.values()), max(contexts.values())
        length = min(map(len, contexts.values())) - 1
        shared = next((place for place in range(length) if first[place] != last[place]), length)
        if shared < 1:
            return 0
        source, *others = contexts
        batch = Batch(torch.tensor(first[:shared]), torch.arange(shared), 0, 0, [Prefill(source, 0, shared)])
        self._decoder.forward(batch, self._cache)
        prefix: KVPrefix = self._cache.save(source, shared)
        for row in others:
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
            self._keep(place, requests[going[place]], answers[going[place]])
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
    """Adds one token to each answer."""
    seeds = np.array([one.seed for one in requests], dtype=np.uint64)
    places = np.array([r.num_drawn + len(a.ids) for r, a in zip(requests, answers, strict=True)], dtype=np.uint64)
    temperatures_B = torch.tensor([one.temperature for one in requests])
    ids_B, logprobs_B = sample(logits_B, temperatures_B, torch.from_numpy(uniforms(seeds, places)))
    for answer, token, logprob in zip(answers, ids_B.tolist(), logprobs_B.tolist(), strict=True):
        answer.ids.append(token)
        answer.logprobs.append(logprob)
