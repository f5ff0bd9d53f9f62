"""Everything that a job needs in this process before an episode can start: its spec, environments and chat codec.

Rule: what cannot be loaded is one typed error that says what to change; it is about the job, never about the worker.
Loading runs the environments' code and reads files, so it happens in a thread.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gspo_core.chat import ChatCodec, load_codec
from gspo_core.env import Environment, InvalidEnvironment, load_environment
from gspo_core.spec import JobSpec


class JobNotServable(Exception):
    """This worker cannot play episodes of the job. Another worker, or the same one later, may."""


@dataclass(frozen=True, slots=True)
class LoadedJob:
    spec: JobSpec
    environments: Sequence[Environment]
    codec: ChatCodec
    context_tokens: int
    """The most that the model can read and write together."""


async def load_job(spec_text: str) -> LoadedJob:
    """Raises ``JobNotServable``."""
    return await asyncio.to_thread(_load, spec_text)


def _load(spec_text: str) -> LoadedJob:
    try:
        spec = JobSpec.model_validate_json(spec_text)
    except ValidationError as error:
        raise JobNotServable(f"the stored specification is not valid here: {error}") from error
    if spec.sampling.top_p != 1:
        raise JobNotServable(
            f"sampling.top_p is {spec.sampling.top_p}, but the log-probs are those of the whole vocabulary; set it to 1"
        )
    model_dir = Path(spec.model)
    try:
        environments = [load_environment(entry.ref, entry.config) for entry in spec.environments]
        for number, environment in enumerate(environments):
            spec.episode_limits(number, environment.limits)
        config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
        context_tokens = _number(config, "max_position_embeddings")
        chat = spec.chat
        codec = load_codec(
            model_dir, format=chat.format, calls=chat.calls, thinking=chat.thinking, variables=chat.variables
        )
        vocab_size = codec.tokenizer.vocab_size
        if vocab_size > _number(config, "vocab_size"):
            # An engine can die of an id that its model does not have.
            raise ValueError(f"the tokenizer has {vocab_size} ids, the model {config['vocab_size']}")
        _check_ends(config, codec.stop_ids)
    except InvalidEnvironment as error:
        raise JobNotServable(str(error)) from error
    except ValidationError as error:
        raise JobNotServable(f"the limits that an environment's author asks for: {error}") from error
    except (OSError, ValueError) as error:
        raise JobNotServable(f"the model directory {model_dir} cannot be used: {error}") from error
    return LoadedJob(spec, environments, codec, context_tokens)


def _check_ends(config: Any, stop_ids: Collection[int]) -> None:
    """Engines also stop at the model's own end tokens; a turn that ends so must count as ended here."""
    given = config.get("eos_token_id")
    ends = given if isinstance(given, list) else [] if given is None else [given]
    if not set(ends) <= set(stop_ids):
        raise ValueError(f"its config.json has eos_token_id {given}, but the chat format ends turns with {stop_ids}")


def _number(config: Any, name: str) -> int:
    value = config.get(name) if isinstance(config, dict) else None
    if not isinstance(value, int):
        raise ValueError(f"its config.json does not say {name}")
    return value
