"""Finds the files of a model that ``gspo eval`` is given: a directory, a name of the hub, or a checkpoint of a job.

Rule: nothing is downloaded. A checkpoint is written as a model directory by its installation, if it is not yet, and
must lie where this machine sees it.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gspo_core.client import DEFAULT_URL, ApiError, Client, ClientError
from gspo_core.evaluation.policy import PolicyUnusable
from gspo_core.json_value import JSON
from services.files.data_dir import DataDir, HubKind, HubName

_JOB = re.compile(r"(?P<job>job_[A-Za-z0-9]+)(@latest|/(?P<epoch>\d+)/(?P<step>\d+))?")
EXPORT_TIMEOUT_S = 900.0
POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class FoundModel:
    directory: Path
    chat: Mapping[str, JSON] = field(default_factory=dict)
    """How its job speaks to it."""


def find_model(name: str, api_url: str) -> FoundModel:
    """Raises ``PolicyUnusable``. Blocks, for as long as an export takes."""
    if (match := _JOB.fullmatch(name)) is not None:
        return _checkpoint(match, api_url)
    if (directory := Path(name)).is_dir():
        return FoundModel(directory.resolve())
    hub_name = HubName.parse(name)
    fetched = None if hub_name is None else _data_dir().hub.fetched(HubKind.MODEL, hub_name)
    if fetched is not None:
        return FoundModel(fetched)
    fetch = f"; `gspo fetch {name}` fetches it, if it is a model of the hub" if hub_name is not None else ""
    raise PolicyUnusable(f"{name} is no directory with a model here{fetch}")


def _checkpoint(match: re.Match[str], api_url: str) -> FoundModel:
    job_id = match["job"]
    try:
        with Client(api_url, api_key=os.environ.get("GSPO_API_KEY")) as client:
            chat = client.config(job_id).get("chat")
            checkpoint_id = _asked(match) or _newest(client, job_id)
            path = _exported(client, checkpoint_id)
    except ApiError as error:
        raise PolicyUnusable(f"{match[0]}: {error.message} [{error.code}]") from error
    except ClientError as error:
        raise PolicyUnusable(f"{match[0]}: {api_url} cannot be asked: {error}") from error
    directory = _data_dir().named(path)
    if not directory.is_dir():
        raise PolicyUnusable(
            f"{checkpoint_id} lies in {path} of its installation's data directory, which is not {_data_dir().path} "
            f"on this machine: set GSPO_DATA_DIR, or name a directory: gspo export {checkpoint_id} --to DIR"
            f"{'' if api_url == DEFAULT_URL else f' --url {api_url}'} fetches it"
        )
    return FoundModel(directory, chat if isinstance(chat, dict) else {})


def _asked(match: re.Match[str]) -> str | None:
    return None if match["step"] is None else f"{match['job']}/{match['epoch']}/{match['step']}"


def _newest(client: Client, job_id: str) -> str:
    newest = next(client.checkpoints(job_id), None)
    if newest is None:
        raise PolicyUnusable(f"{job_id} has no checkpoint yet")
    return newest["id"]


def _exported(client: Client, checkpoint_id: str) -> str:
    """The path of its export below the data directory."""
    deadline = time.monotonic() + EXPORT_TIMEOUT_S
    export = client.export_checkpoint(checkpoint_id)["export"]
    while export["status"] != "ready":
        if export["status"] == "failed" or time.monotonic() > deadline:
            raise PolicyUnusable(f"{checkpoint_id} cannot be exported: {export['message'] or 'it takes too long'}")
        time.sleep(POLL_S)
        export = client.checkpoint(checkpoint_id)["export"]
    assert export["path"] is not None
    return export["path"]


def _data_dir() -> DataDir:
    return DataDir(Path(os.environ.get("GSPO_DATA_DIR", ".gspo")).resolve())
