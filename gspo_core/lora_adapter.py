"""Low-rank additions as files that `peft` loads, and the weights that they stand for over their base, bit for bit.

Rule: every merge computes the same, with one function, on the CPU. An adapter carries the digests of its base and of
the merged weights, so that a wrong base, a damaged file or other arithmetic is refused before anything is loaded. It
trains nothing, and imports no `peft`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

FORMAT = 1
ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
MERGED_NAME = "merged.json"
_PREFIX = "base_model.model."
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_SHORT = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
# Other values would make the sum differ from the one computed here.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none", None),
    **dict.fromkeys(("use_rslora", "use_dora", "fan_in_fan_out", "lora_bias"), (False, None)),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), ({}, None)),
    **dict.fromkeys(("modules_to_save", "layer_replication", "trainable_token_indices", "target_parameters"), (None,)),
}


class AdapterRefused(ValueError):
    """The files hold no additions that can be merged over this base as they were published."""


class Merged(msgspec.Struct, frozen=True, kw_only=True):
    """The result of merging an adapter over its base."""

    format: int
    base_digest: str
    """Over all tensors of the base, as its files hold them."""
    dtype: str
    """In which the weights are published."""
    digest: str
    """Over all tensors of the result."""


@dataclass(frozen=True)
class LoraAdapter:
    base: Path
    scaling: float
    additions: Mapping[str, tuple[Tensor, Tensor]]
    """By name of the base tensor: the two matrices whose product is added to it."""


def add_product(weight: Tensor, up: Tensor, down: Tensor, scaling: float) -> Tensor:
    """The sum, in the dtype and at the place of `weight`. Everything that publishes or merges goes through here."""
    return (up @ down).mul_(scaling).cpu().add_(weight).to(weight.dtype)


def write_additions(
    directory: Path, additions: Mapping[str, tuple[Tensor, Tensor]], config: Mapping[str, Any], base: str
) -> None:
    """As `peft` names them. `additions`: (up, down) of each layer by its name; `config`: what is said of all."""
    tensors: dict[str, Tensor] = {}
    for name, (up, down) in additions.items():
        tensors[f"{_PREFIX}{name}{_DOWN}"] = down.detach().cpu().contiguous()
        tensors[f"{_PREFIX}{name}{_UP}"] = up.detach().cpu().contiguous()
    save_file(tensors, directory / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    (directory / ADAPTER_WEIGHTS).chmod(0o644)  # safetensors makes files private; engines may run as another user
    # Not written by peft itself: its file names its version, so that equal additions would differ after an upgrade.
    said = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
        **config,
    }
    _write_config(directory, said)


def name_base(directory: Path, base: str) -> None:
    """Say that an adapter is over the model at another place."""
    _write_config(directory, _read_json(directory / ADAPTER_CONFIG) | {"base_model_name_or_path": base})


def _write_config(directory: Path, said: Mapping[str, Any]) -> None:
    (directory / ADAPTER_CONFIG).write_text(json.dumps(said, indent=2, sort_keys=True) + "\n")


def read_additions(directory: Path) -> LoraAdapter:
    """Raises AdapterRefused."""
    said = _read_json(directory / ADAPTER_CONFIG)
    strange = [name for name, neutral in _NEUTRAL.items() if name in said and said[name] not in neutral]
    if said.get("peft_type") != "LORA" or strange:
        raise AdapterRefused(f"{ADAPTER_CONFIG}: only plain LoRA is merged here; {strange or ['peft_type']} differ")
    try:
        scaling = said["lora_alpha"] / said["r"]
        base = Path(said["base_model_name_or_path"])
        tensors = load_file(directory / ADAPTER_WEIGHTS)
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise AdapterRefused(f"{ADAPTER_CONFIG} is damaged: {error!r}") from error
    except (OSError, SafetensorError) as error:
        raise AdapterRefused(f"{ADAPTER_WEIGHTS} cannot be read: {error}") from error
    layers = {name.removeprefix(_PREFIX).removesuffix(_DOWN) for name in tensors if name.endswith(_DOWN)}
    expected = {f"{_PREFIX}{layer}{part}" for layer in layers for part in (_DOWN, _UP)}
    if not layers or expected != tensors.keys():
        raise AdapterRefused(f"{ADAPTER_WEIGHTS} holds other tensors than pairs of additions")
    # Copied: where a matrix begins at any address of its file, a product of it may be summed in another order.
    pairs = {
        f"{layer}.weight": (tensors[f"{_PREFIX}{layer}{_UP}"].clone(), tensors[f"{_PREFIX}{layer}{_DOWN}"].clone())
        for layer in layers
    }
    return LoraAdapter(base, scaling, pairs)


class BaseWeights:
    """The tensors of a model directory, mapped into memory, with digests that are computed once."""

    def __init__(self, directory: Path) -> None:
        """Raises AdapterRefused."""
        self.directory = directory
        self._of: dict[str, Any] = {}
        """By the name of a tensor: its open file."""
        self._sha256: dict[tuple[str, torch.dtype], str] = {}
        self._digest: str | None = None
        try:
            for path in _files(directory):
                opened: Any = safe_open(path, framework="pt")
                self._of |= dict.fromkeys(opened.keys(), opened)
        except (OSError, ValueError, KeyError, AttributeError, SafetensorError) as error:
            raise AdapterRefused(f"the base model at {directory} cannot be read: {error}") from error

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._of))

    def __contains__(self, name: str) -> bool:
        return name in self._of

    def tensor(self, name: str) -> Tensor:
        found: Tensor = self._of[name].get_tensor(name)
        return found

    def sha256(self, name: str, dtype: torch.dtype) -> str:
        """The tensor's in this dtype."""
        if (name, dtype) not in self._sha256:
            self._sha256[name, dtype] = _sha256(self.tensor(name).to(dtype))
        return self._sha256[name, dtype]

    def digest(self) -> str:
        """Over all tensors, as the files hold them."""
        if self._digest is None:
            tensors = ((name, self.tensor(name)) for name in self)
            self._digest = digest_of(_described(name, one, _sha256(one)) for name, one in tensors)
        return self._digest

    def check_targets(self, names: Iterable[str]) -> None:
        """Raises AdapterRefused for additions to what the files do not hold under the name of the model's layer."""
        if lacking := sorted(name for name in names if name not in self):
            raise AdapterRefused(f"the files of {self.directory} hold no {lacking[0]}, to which there is an addition")


def merge(base: BaseWeights, adapter: LoraAdapter, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, bool]]:
    """Each tensor of the published model, and whether there is an addition to it. Raises AdapterRefused."""
    base.check_targets(adapter.additions)
    for name in base:
        weight = base.tensor(name).to(dtype)
        if name in adapter.additions:
            up, down = adapter.additions[name]
            is_pair = up.ndim == down.ndim == 2 and up.shape[1] == down.shape[0]
            if not is_pair or weight.shape != (up.shape[0], down.shape[1]):
                raise AdapterRefused(f"the addition to {name} has another shape")
            weight = add_product(weight, up, down, adapter.scaling)
        yield name, weight, name in adapter.additions


def describe_merged(base: BaseWeights, directory: Path, dtype: torch.dtype) -> None:
    """Write beside an adapter what comes out where it is merged. Raises AdapterRefused."""
    entries = []
    for name, tensor, is_added in merge(base, read_additions(directory), dtype):
        entries.append(_described(name, tensor, _sha256(tensor) if is_added else base.sha256(name, dtype)))
    said = Merged(
        format=FORMAT,
        base_digest=base.digest(),
        dtype=str(dtype).removeprefix("torch."),
        digest=digest_of(entries),
    )
    (directory / MERGED_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(said), indent=1) + b"\n")


def merged_weights(base: BaseWeights, directory: Path) -> dict[str, Tensor]:
    """All weights that were published as an adapter. Raises AdapterRefused, also if merging here gives other bits than
    it gave the publisher."""
    said = _read_merged(directory)
    if base.digest() != said.base_digest:
        raise AdapterRefused(f"{base.directory} is not the base that the adapter is over: its digest is another one")
    dtype, tensors, entries = _DTYPES[said.dtype], dict[str, Tensor](), []
    for name, tensor, is_added in merge(base, read_additions(directory), dtype):
        tensors[name] = tensor
        entries.append(_described(name, tensor, _sha256(tensor) if is_added else base.sha256(name, dtype)))
    if digest_of(entries) != said.digest:
        raise AdapterRefused(
            "merged here the adapter gives other bits than where it was published: the file is damaged, or this "
            "machine multiplies matrices otherwise; use rollout.weight_transport disk"
        )
    return tensors


def digest_of(entries: Iterable[tuple[str, str, list[int], str]]) -> str:
    """SHA-256 over each tensor's name, dtype, shape and SHA-256 of its bits, as in deltas."""
    return hashlib.sha256(msgspec.json.encode(sorted(entries))).hexdigest()


def _described(name: str, tensor: Tensor, sha256: str) -> tuple[str, str, list[int], str]:
    return name, _SHORT.get(tensor.dtype, str(tensor.dtype)), list(tensor.shape), sha256


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()


def _read_merged(directory: Path) -> Merged:
    try:
        said = msgspec.json.decode((directory / MERGED_NAME).read_bytes(), type=Merged)
    except (OSError, msgspec.DecodeError) as error:
        raise AdapterRefused(f"{directory.name}/{MERGED_NAME} cannot be read: {error}") from error
    if said.format != FORMAT or said.dtype not in _DTYPES:
        raise AdapterRefused(f"{MERGED_NAME} has format {said.format}, {said.dtype}; this process reads {FORMAT}")
    return said


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise AdapterRefused(f"{path.name} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise AdapterRefused(f"{path.name} is damaged: it holds no object")
    return found


def _files(directory: Path) -> list[Path]:
    one, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if one.is_file():
        return [one]
    names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    return [directory / Path(name).name for name in names]
