"""What SGLang can do, by the version and the layout that it reports. It asks nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.engines.protocol import EngineProtocolError

# How a block of bytes that holds many tensors is announced.
FLATTENED = "flattened_bucket"
# What `/server_info` says about the ranks of an engine.
_LAYOUT = ("tp_size", "dp_size", "pp_size")


@dataclass(frozen=True, slots=True, order=True)
class EngineProfile:
    """Capabilities of an engine, by the version of SGLang that it reports."""

    version: tuple[int, int, int]

    @classmethod
    def parse(cls, text: str) -> EngineProfile:
        """``0.5.23``, ``0.5.12.post1``, ``0.5`` (which is 0.5.0); raises EngineProtocolError."""
        # 0.1.dev7 is what a checkout without tags calls itself, and says nothing.
        match = re.match(r"(\d+)\.(\d+)(?:\.(\d+)|(?!\d|\.?dev))", text)
        if match is None:
            raise EngineProtocolError(f"an engine version must look like 0.5.23, not {text!r}")
        major, minor, patch = (int(number or 0) for number in match.groups())
        return cls((major, minor, patch))

    @property
    def names_versions(self) -> bool:
        """Whether answers name the weights that sampled each token; training needs it."""
        return self.version >= (0, 5, 19)

    @property
    def has_ready(self) -> bool:
        return self.version >= (0, 5, 20)

    @property
    def has_weight_sessions(self) -> bool:
        """Whether sent tensors must stand between ``begin_weight_update`` and ``end_weight_update``."""
        return self.version >= (0, 5, 21)

    def __str__(self) -> str:
        return ".".join(map(str, self.version))


def group_problem(said: Mapping[str, Any]) -> str:
    """Why an engine of this layout cannot be a member of a process group; empty if it can. SGLang gives each rank of
    tensor parallelism the next place in the group, does not count stages, and refuses copies that share an address."""
    sizes = {name: said.get(name) for name in _LAYOUT}
    if unknown := [name for name, size in sizes.items() if not isinstance(size, int)]:
        return f"it does not say how many ranks it has ({', '.join(unknown)})"
    if sizes["pp_size"] != 1:
        return f"it has several stages (pp_size {sizes['pp_size']}), of which a group would count one"
    if sizes["dp_size"] != 1 and said.get("enable_dp_attention") is not True:
        return f"it has several copies (dp_size {sizes['dp_size']}): start one server for each of them"
    return ""


def num_ranks(said: Mapping[str, Any]) -> int:
    """Places that it takes in a group. With attention in data parallelism the same ranks do both."""
    size = said.get("tp_size")
    return size if isinstance(size, int) else 1
