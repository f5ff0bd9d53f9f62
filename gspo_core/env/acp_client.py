"""The client side that an agent of the Agent Client Protocol talks to: a folder, permissions, and a listener.

Rule: files are read and written in the episode's folder alone, and a request beyond it, or one that was not offered,
gets an error of the protocol. Nothing is asked of a person.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections import deque
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Literal

from gspo_core.env.acp_messages import INTERNAL_ERROR, INVALID_PARAMS, METHOD_NOT_FOUND, RESOURCE_NOT_FOUND, RpcError
from gspo_core.json_value import JSON

CAPABILITIES: Mapping[str, JSON] = {"fs": {"readTextFile": True, "writeTextFile": True}, "terminal": False}
MAX_FILE_BYTES = 8 << 20
MAX_SAID_CHARS = 1 << 20
MAX_DEPTH = 256
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
Permissions = Literal["allow", "reject"]
_KINDS = {"allow": ("allow_once", "allow_always"), "reject": ("reject_once", "reject_always")}


class EpisodeClient:
    def __init__(self, folder: Path, permissions: Permissions) -> None:
        self._folder, self._permissions = folder.resolve(), permissions
        self._said: deque[str] = deque()
        self._num_chars = 0
        self.is_cancelled = False
        """Then no permission is given any more, as the protocol wants it."""

    @property
    def said(self) -> str:
        """What the agent told its user; of very much, the end."""
        text = "".join(self._said)[-MAX_SAID_CHARS:]
        return text.encode("utf-8", "replace").decode()

    def answer(self, method: str, params: Mapping[str, JSON]) -> JSON:
        """Raises ``RpcError``."""
        if method == "session/request_permission":
            return {"outcome": self._outcome(params)}
        if method not in ("fs/read_text_file", "fs/write_text_file"):
            raise RpcError(METHOD_NOT_FOUND, f"there is no {method[:200]} here")
        path = self._place(params)
        try:
            if method == "fs/read_text_file":
                return {"content": _lines(_read(self._folder, path), params)}
            _write(self._folder, path, params)
        except FileNotFoundError:
            raise RpcError(RESOURCE_NOT_FOUND, f"there is no file {path}") from None
        except OSError as error:
            raise RpcError(INTERNAL_ERROR, f"{path}: {error.strerror}") from None
        return {}

    def hear(self, method: str, params: Mapping[str, JSON]) -> None:
        update = params.get("update")
        if method != "session/update" or not isinstance(update, dict):
            return
        content = update.get("content")
        if update.get("sessionUpdate") == "agent_message_chunk" and isinstance(content, dict):
            self._say(content.get("text"))

    def begin_prompt(self) -> None:
        """What is said from here on answers another prompt."""
        if self._said:
            self._say("\n")

    def _say(self, text: JSON) -> None:
        if not isinstance(text, str) or not text:
            return
        self._said.append(text)
        self._num_chars += len(text)
        while self._num_chars - len(self._said[0]) > MAX_SAID_CHARS:
            self._num_chars -= len(self._said.popleft())

    def _outcome(self, params: Mapping[str, JSON]) -> dict[str, JSON]:
        given = params.get("options")
        options = (
            [one for one in given if isinstance(one, dict) and one.get("optionId")] if isinstance(given, list) else []
        )
        chosen = [one["optionId"] for kind in _KINDS[self._permissions] for one in options if one.get("kind") == kind]
        if self._permissions == "allow":  # there may be kinds of its own alone
            chosen += [one["optionId"] for one in options]
        if self.is_cancelled or not chosen:
            return {"outcome": "cancelled"}
        return {"outcome": "selected", "optionId": chosen[0]}

    def _place(self, params: Mapping[str, JSON]) -> Path:
        """Where the path leads, symbolic links followed. Raises ``RpcError``."""
        given = params.get("path")
        try:
            if not isinstance(given, str) or not os.path.isabs(given):
                raise ValueError("not an absolute path")
            path = Path(given).resolve()
        except (OSError, ValueError, RuntimeError) as error:  # no text, a null byte, a circle of links
            raise RpcError(INVALID_PARAMS, f"path: {error}") from None
        if not path.is_relative_to(self._folder):
            raise RpcError(INVALID_PARAMS, f"{given[:1000]} is not in the session's folder {self._folder}")
        if len(path.parts) - len(self._folder.parts) > MAX_DEPTH:
            raise RpcError(INVALID_PARAMS, f"path: deeper than {MAX_DEPTH} folders")
        return path


def _opened(folder: Path, path: Path, flags: int) -> int:
    """A descriptor of the file. Links that were put on its path meanwhile are not followed; missing folders are made if
    it is opened to be created. Opening never blocks, even on a pipe."""
    *above, name = path.relative_to(folder).parts or (".",)
    at = os.open(folder, _FOLDER)
    try:
        for part in above:
            if flags & os.O_CREAT:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=at)
            inner = os.open(part, _FOLDER, dir_fd=at)
            os.close(at)
            at = inner
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666, dir_fd=at)
    finally:
        os.close(at)


def _read(folder: Path, path: Path) -> str:
    descriptor = _opened(folder, path, os.O_RDONLY)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise RpcError(INVALID_PARAMS, f"{path} is no regular file")
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise RpcError(INVALID_PARAMS, f"{path} has more than {MAX_FILE_BYTES} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise RpcError(INVALID_PARAMS, f"{path} is no text in UTF-8") from None


def _lines(text: str, params: Mapping[str, JSON]) -> str:
    """From the line ``line``, counted from 1, at most ``limit`` of them."""
    line, limit = params.get("line"), params.get("limit")
    if line is None and limit is None:
        return text
    first = line - 1 if isinstance(line, int) and line > 0 else 0
    most = limit if isinstance(limit, int) and limit >= 0 else None
    return "".join(StringIO(text, newline="\n").readlines()[first:][:most])


def _write(folder: Path, path: Path, params: Mapping[str, JSON]) -> None:
    content = params.get("content")
    if not isinstance(content, str):
        raise RpcError(INVALID_PARAMS, "content is no text")
    data = content.encode("utf-8", "replace")
    descriptor = _opened(folder, path, os.O_WRONLY | os.O_CREAT)
    with open(descriptor, "wb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise RpcError(INVALID_PARAMS, f"{path} is no regular file")
        file.truncate(0)
        file.write(data)
