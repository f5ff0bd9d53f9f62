"""A model without memory (on torch's meta device), and filling it from files, each rank with its own rows.

One rule: a filled model equals what transformers itself loads, bit for bit, whatever the number of ranks; and no
rank reads or holds more than its part, save one tensor at a time where a file format joins several. Weights
that files lack are refused, never made up. It neither chooses how a model is sharded nor checks what it computes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gspo_core.learner.ranks import local, rows_of, spread_like
from gspo_core.learner.weight_files import WeightFiles

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Site = tuple[nn.Module, str]
"""A module, and the name under which it holds a tensor."""
Rows = tuple[int, int]


class MissingWeights(ValueError):
    """The files lack a tensor of the model, or hold one of another shape."""


@dataclass
class _Recipe:
    """The tensors of files that become one tensor of the model, or several."""

    converter: Any
    """A `WeightConverter` of transformers; None where a tensor is taken as it is."""
    keys: list[tuple[str, str]] = field(default_factory=list)
    """(pattern of the converter, name in the files), in the order in which they are joined."""


@dataclass(frozen=True)
class Skeleton:
    """A model whose tensors are on the meta device, and where each of them is found."""

    model: PreTrainedModel
    sites: Mapping[str, list[Site]]
    """By the plain model's names; tied tensors have one name and several sites."""
    recipes: Mapping[str, _Recipe]
    """By the name of the (first) tensor that each makes."""


def skeleton_of(model: PreTrainedModel, names: Iterable[str]) -> Skeleton:
    """`names` are those of the tensors in its files. Call this before anything renames or shards its tensors."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

    conversions = get_model_conversion_mapping(model)
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    renamings = [one for one in conversions if not isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    own = model.state_dict()
    recipes: dict[str, _Recipe] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, own)
        if target not in own and name in own:
            target, pattern = name, None
        if target in own:
            converter = None if pattern is None else by_pattern[pattern]
            recipes.setdefault(target, _Recipe(converter)).keys.append((pattern or name, name))
    model._weight_conversions = [one for one in conversions if one.was_used()]  # for saving in the files' own format
    return Skeleton(model, _sites(model), recipes)


def _sites(model: nn.Module) -> dict[str, list[Site]]:
    names: dict[int, str] = {}
    sites: dict[str, list[Site]] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        owner, _, attribute = name.rpartition(".")
        first = names.setdefault(id(tensor), name)
        sites.setdefault(first, []).append((model.get_submodule(owner), attribute))
    return sites


@torch.no_grad()
def fill(skeleton: Skeleton, files: WeightFiles, device: torch.device) -> None:
    """Give every tensor of the model its memory on `device` and its values (this rank's rows of them)."""
    of_site = {
        f"{id(module)}.{attribute}": name for name, sites in skeleton.sites.items() for module, attribute in sites
    }
    filled = set()
    for target, recipe in skeleton.recipes.items():
        for name, value in _values(skeleton, target, recipe, files).items():
            owner, _, attribute = name.rpartition(".")
            module = _module_of(skeleton, name) if name in skeleton.sites else skeleton.model.get_submodule(owner)
            first = of_site.get(f"{id(module)}.{attribute}", name)
            if first in skeleton.sites and first not in filled:
                _place(skeleton.sites[first], value, name, device)
                filled.add(first)
    _fill_computed(skeleton, filled, device)


def take_over(skeleton: Skeleton, other: Skeleton) -> None:
    """Give a second skeleton of the same model, sharded alike, the tensors of a filled one; they are not copied."""
    for name, sites in skeleton.sites.items():
        (module, attribute), *_ = other.sites[name]
        given = getattr(module, attribute)
        part = local(given.detach()) if isinstance(given, nn.Parameter) else given
        _set(sites, part)


def _module_of(skeleton: Skeleton, name: str) -> nn.Module:
    return skeleton.sites[name][0][0]


def _values(skeleton: Skeleton, target: str, recipe: _Recipe, files: WeightFiles) -> dict[str, Callable[[], Tensor]]:
    """For each tensor that a recipe makes, what reads this rank's rows of it."""
    if recipe.converter is None:
        ((_, key),) = recipe.keys
        like = _tensor_at(skeleton, target)
        return {target: lambda: _read_rows(files, key, like, target)}
    rows = rows_of(_tensor_at(skeleton, target))
    if _stacks_rows(recipe.converter):
        if rows[0] == rows[1]:
            return {target: lambda: torch.empty((0, *_tensor_at(skeleton, target).shape[1:]))}
        made = _convert(skeleton, target, recipe, files, rows)
        return {name: lambda value=value: value for name, value in made.items()}  # type: ignore[misc]
    whole = _convert(skeleton, target, recipe, files, None)
    return {name: lambda name=name, value=value: _cut(skeleton, name, value) for name, value in whole.items()}  # type: ignore[misc]


def _cut(skeleton: Skeleton, name: str, value: Tensor) -> Tensor:
    like = _tensor_at(skeleton, name)
    _check_shape(name, tuple(value.shape), like)
    first, end = rows_of(like)
    return value[first:end] if like.ndim else value


def _stacks_rows(converter: Any) -> bool:
    """Whether each source is one row of the result (an expert), so that a rank needs to read its own alone."""
    kinds = [type(one).__name__ for one in converter.operations]
    first, *others = converter.operations
    stacks = kinds[0] == "MergeModulelist" and first.dim == 0
    return stacks and all(kind == "Concatenate" and one.dim != 0 for kind, one in zip(kinds[1:], others, strict=True))


def _convert(
    skeleton: Skeleton, target: str, recipe: _Recipe, files: WeightFiles, rows: Rows | None
) -> dict[str, Tensor]:
    converter = copy.deepcopy(recipe.converter)
    found: dict[str, int] = {}
    for pattern, key in recipe.keys:
        index = found[pattern] = found.get(pattern, -1) + 1
        if rows is None or rows[0] <= index < rows[1]:
            converter.add_tensor(target, key, pattern, lambda key=key: files.read(key))
    made = converter.convert(target, model=skeleton.model, config=skeleton.model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _tensor_at(skeleton: Skeleton, name: str) -> Tensor:
    if name in skeleton.sites:
        module, attribute = skeleton.sites[name][0]
    else:  # a second name of a tied tensor
        owner, _, attribute = name.rpartition(".")
        module = skeleton.model.get_submodule(owner)
    found: Tensor = getattr(module, attribute)
    return found


def _read_rows(files: WeightFiles, key: str, like: Tensor, name: str) -> Tensor:
    _check_shape(name, files.shape(key), like)
    first, end = rows_of(like)
    return files.read_rows(key, first, end) if like.ndim else files.read(key)


def _check_shape(name: str, found: tuple[int, ...], like: Tensor) -> None:
    if found != tuple(like.shape):
        raise MissingWeights(f"{name} has the shape {found} in the files, and {tuple(like.shape)} in the model")


def _place(sites: list[Site], read: Callable[[], Tensor], name: str, device: torch.device) -> None:
    module, attribute = sites[0]
    like = getattr(module, attribute)
    part = local(like.detach()) if isinstance(like, nn.Parameter) else like
    values = read()
    if values.shape != part.shape:
        raise MissingWeights(f"{name}: its files make {tuple(values.shape)}, and the model holds {tuple(part.shape)}")
    _set(sites, torch.empty(part.shape, dtype=part.dtype, device=device).copy_(values))


def _set(sites: list[Site], part: Tensor) -> None:
    module, attribute = sites[0]
    like = getattr(module, attribute)
    if isinstance(like, nn.Parameter):
        made: Tensor = nn.Parameter(spread_like(part, like.detach()), requires_grad=like.requires_grad)
    else:
        made = part
    # transformers leaves alone what carries this mark when it computes the buffers that no file holds
    made._is_hf_initialized = True  # type: ignore[attr-defined]
    for place, name in sites:
        setattr(place, name, made)


def _fill_computed(skeleton: Skeleton, filled: set[str], device: torch.device) -> None:
    """Compute the buffers that no file holds (rotations); refuse whatever else is missing."""
    model = skeleton.model
    computed = [name for name in skeleton.sites if name not in filled]
    for name in computed:
        module, attribute = skeleton.sites[name][0]
        if attribute not in module._non_persistent_buffers_set:
            raise MissingWeights(f"the files of {type(model).__name__} hold no {name}")
        buffer = getattr(module, attribute)
        setattr(module, attribute, torch.empty_like(buffer, device=device))
    for module in {id(_module_of(skeleton, name)): _module_of(skeleton, name) for name in computed}.values():
        model._init_weights(module)
