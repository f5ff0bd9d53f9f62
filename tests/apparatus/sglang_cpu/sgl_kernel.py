"""Stands in for the package of compiled kernels, which has no build for a CPU without special instructions.

Rule: what cannot work here fails when it is called, and names itself. On the way of plain text generation one name is
called, and that one is written out below in torch.
"""

import torch

__version__ = "0.0.0"


def assign_req_to_token_pool_cpu(
    request_rows: torch.Tensor,
    token_table: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    places: torch.Tensor,
    _width: int,
) -> None:
    """Writes the cache places of each request's new tokens into its row of the table."""
    taken = 0
    for row, start, end in zip(request_rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        if end > start:
            token_table[row, start:end] = places[taken : taken + end - start].to(token_table.dtype)
            taken += end - start


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_args: object, **_kwargs: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} is not here: this environment runs SGLang on a CPU, text only")

    return missing
