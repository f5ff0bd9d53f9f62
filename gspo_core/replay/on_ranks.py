"""Steps that several ranks trained, trained again on as many: ``torchrun --nproc-per-node N --no-python gspo replay``.

The rule: every rank reads the same past and trains its part, on one machine; the first one alone compares and tells.
With one rank everything here is the identity. Only bytes travel between ranks.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from gspo_core.learner import Ranks

_PATH_BYTES = 4096


@contextlib.contextmanager
def met() -> Iterator[Ranks]:
    """The ranks that torchrun started, or one."""
    if not dist.is_torchelastic_launched():
        yield Ranks(0, 1)
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield Ranks.current()
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """A new folder that all ranks see, until all have left it."""
    ranks = Ranks.current()
    with contextlib.ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="gspo-replay-")) if ranks.is_first else ""
        yield Path(_told(name) if ranks.num_ranks > 1 else name)
        ranks.wait()


def _told(name: str) -> str:
    """What the first rank says, on all of them."""
    told = torch.zeros(_PATH_BYTES, dtype=torch.uint8)
    data = name.encode()
    told[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    dist.broadcast(told, src=0)
    return bytes(told.tolist()).rstrip(b"\0").decode()
