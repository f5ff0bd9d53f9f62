"""Chunked log-probs equal the plain formula, in value and gradient, and never hold tokens times vocabulary."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gspo_core.learner.logprobs import chosen_logprobs
from gspo_core.objective_config import ObjectiveConfig
from tests.core.learner_support import make_learner, make_sequences, write_model


def problem(
    num_rows: int = 7, width: int = 5, vocabulary: int = 11, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype, requires_grad=True)

    return {
        "hidden": random(num_rows, width),
        "head": random(vocabulary, width),
        "bias": random(vocabulary),
        "targets_N": torch.randint(vocabulary, (num_rows,), generator=generator),
        "temperatures_N": torch.rand(num_rows, generator=generator, dtype=dtype) + 0.5,
    }


def plain(hidden: Tensor, head: Tensor, bias: Tensor, targets_N: Tensor, temperatures_N: Tensor) -> Tensor:
    logits_NV = (hidden @ head.T + bias) / temperatures_N[:, None]
    return torch.log_softmax(logits_NV, -1)[torch.arange(len(targets_N)), targets_N]


@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, 100])
def test_gradcheck_in_float64(chunk_tokens: int) -> None:
    given = problem()

    def scored(hidden: Tensor, head: Tensor, bias: Tensor) -> Tensor:
        return chosen_logprobs(
            hidden, head, given["targets_N"], given["temperatures_N"], bias=bias, chunk_tokens=chunk_tokens
        )

    assert torch.autograd.gradcheck(scored, (given["hidden"], given["head"], given["bias"]))


@pytest.mark.parametrize("chunk_tokens", [2, 100])
def test_equals_the_plain_formula_and_its_gradient(chunk_tokens: int) -> None:
    given = problem(dtype=torch.float32)
    leaves = [given["hidden"], given["head"], given["bias"]]
    weights_N = torch.linspace(-1, 1, 7)
    ours_N = chosen_logprobs(**given, chunk_tokens=chunk_tokens)
    expected_N = plain(**given)
    torch.testing.assert_close(ours_N, expected_N, rtol=1e-6, atol=1e-6)
    ours = torch.autograd.grad((ours_N * weights_N).sum(), leaves)
    expected = torch.autograd.grad((expected_N * weights_N).sum(), leaves)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def test_without_rows_gradients_are_zero() -> None:
    given = problem(num_rows=0)
    chosen_logprobs(**given).sum().backward()
    assert given["head"].grad is not None
    assert not given["head"].grad.any()


def test_half_precision_states_still_give_float32_log_probs() -> None:
    given = problem(num_rows=64, width=32, vocabulary=101, dtype=torch.float32)
    half = {**given, "hidden": given["hidden"].detach().bfloat16().requires_grad_()}
    scored_N = chosen_logprobs(**half, chunk_tokens=16)
    assert scored_N.dtype == torch.float32
    # what enters is rounded, what is computed from it is not
    exact_N = plain(**{**given, "hidden": half["hidden"].double(), "head": given["head"].bfloat16().double()})
    torch.testing.assert_close(scored_N, exact_N.float(), rtol=1e-5, atol=1e-5)
    scored_N.sum().backward()
    assert half["hidden"].grad is not None
    assert half["hidden"].grad.dtype == torch.bfloat16
    assert given["head"].grad is not None
    assert given["head"].grad.dtype == torch.float32


def test_extreme_logits_stay_finite() -> None:
    given = problem(dtype=torch.float32)
    scaled = {**given, "hidden": (given["hidden"].detach() * 1e4).requires_grad_()}
    scored_N = chosen_logprobs(**scaled)
    scored_N.sum().backward()
    assert torch.isfinite(scored_N).all()
    assert scaled["hidden"].grad is not None
    assert torch.isfinite(scaled["hidden"].grad).all()


class LargestResult(TorchDispatchMode):
    """Remembers the largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor):
                self.elements = max(self.elements, math.prod(value.shape))
        return result


def test_never_holds_tokens_times_vocabulary() -> None:
    num_rows, vocabulary, chunk = 96, 64, 8
    given = problem(num_rows=num_rows, width=4, vocabulary=vocabulary, dtype=torch.float32)
    with LargestResult() as largest:
        chosen_logprobs(**given, chunk_tokens=chunk).sum().backward()
    assert largest.elements == chunk * vocabulary


def test_a_step_of_the_learner_never_holds_them_either(tmp_path: Path) -> None:
    """Proximal pass, forward, backward and update: nothing is larger than the head and its chunk."""
    vocabulary, chunk = 4_000, 8
    learner = make_learner(
        write_model(tmp_path / "model", vocab_size=vocabulary),
        ObjectiveConfig(minibatches=2),
        logprob_chunk_tokens=chunk,
    )
    sequences = make_sequences(16)
    num_actions = sum(sequence.num_actions for sequence in sequences)
    with LargestResult() as largest:
        learner.step(sequences)
    head = learner._policy.head.weight.numel()
    assert largest.elements == max(head, chunk * vocabulary) < num_actions / 2 * vocabulary
