"""What the reward of an episode was made from, so that another reward can be tried on it later.

Rule: a value comes back exactly as it was, or it is left out and its name says why; nothing is shortened. The caller
bounds the bytes. It does not know what a reward is, and never asks a world or a judge anything.

Names: ``task``, ``result`` (what an agent returned), ``judge`` (what a model answered), ``messages`` (where the reward
reads the conversation), ``environment`` (which one of the job's, where it has several), and ``state.NAME`` for each
attribute of the world as it was before it was judged.
"""

from __future__ import annotations

import base64
import binascii
import inspect
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping

from gspo_core.json_value import JSON
from gspo_core.types import Evidence

TASK, RESULT, JUDGE, MESSAGES, ENVIRONMENT, STATE = "task", "result", "judge", "messages", "environment", "state."
# Names that are left out, each with its reason: the rest is a number.
MAX_LEFT_OUT, MAX_WHY_CHARS = 32, 120
_MAX_DEPTH = 32
_STRING = re.compile(r'\{"\$bytes":"(?P<bytes>[^"]*)"\}|(?P<text>"(?:[^"\\]|\\.)*")')
_SECRET = re.compile(r"secret|token|passw|api_?key|credential|private_?key", re.IGNORECASE)


class NotPlain(ValueError):
    """The value cannot be kept; the text says why."""


def gathered(values: Iterable[tuple[str, object]], most_bytes: int) -> Evidence:
    """As many of ``values`` as fit, in their order."""
    told, left_out, room = dict[str, str](), dict[str, str](), most_bytes
    for name, value in values:
        try:
            text = plain_text(value, room - len(name))
        except NotPlain as error:
            left_out[name] = str(error)
        else:
            told[name] = text
            room -= len(name) + len(text)
    return Evidence(told, _few(left_out))


def state_of(instance: object, chosen: Iterable[str] | None) -> Iterable[tuple[str, object]]:
    """The attributes of a world by the names of evidence. ``chosen``: those that its author named; None: all but
    secrets."""
    found = getattr(instance, "__dict__", None)
    if chosen is not None:
        return [(STATE + name, _named(instance, name)) for name in chosen]
    if found is None:
        return [(STATE + "*", _Refused("its class has __slots__: name what to keep in end_state"))]
    return [(STATE + name, _unless_secret(name, value)) for name, value in list(found.items()) if _is_name(name)]


def plain_text(value: object, most_bytes: int) -> str:
    """ASCII that ``value_of`` turns back into an equal value of the same types. Raises NotPlain."""
    if isinstance(value, _Refused):
        raise NotPlain(value.why)
    room = [most_bytes]
    try:
        text = json.dumps(_tagged(value, room, most_bytes, 0), allow_nan=False, separators=(",", ":"))
    except (RuntimeError, ValueError) as error:  # it changes while it is read, or has too many digits
        if isinstance(error, NotPlain):
            raise
        raise NotPlain(str(error)[:MAX_WHY_CHARS]) from None
    if len(text) > most_bytes:
        raise _too_long(most_bytes)
    return text


def value_of(text: str) -> object:
    """Raises NotPlain for a text that ``plain_text`` never writes."""
    try:
        return _untagged(json.loads(text))
    except (ValueError, TypeError, KeyError, RecursionError, binascii.Error) as error:
        raise NotPlain(f"is no evidence of this release: {error}") from None


def with_texts(text: str, changed: Callable[[str], str]) -> str:
    """What ``plain_text`` wrote, with each text in it ``changed``, and bytes as the text of their Latin letters."""

    def again(found: re.Match[str]) -> str:
        if found["bytes"] is None:
            return json.dumps(changed(json.loads(found["text"])))
        of_bytes = base64.b64decode(found["bytes"]).decode("latin-1")
        return f'{{"$bytes":"{base64.b64encode(changed(of_bytes).encode("latin-1")).decode()}"}}'

    return _STRING.sub(again, text)


def state_in(evidence: Evidence) -> dict[str, object]:
    """The attributes of the world, as far as they were kept. Raises NotPlain."""
    found = ((name.removeprefix(STATE), text) for name, text in evidence.told.items() if name.startswith(STATE))
    return {name: value_of(text) for name, text in found}


def both(first: Evidence, second: Evidence, most_bytes: int) -> Evidence:
    """Where both have a name, the first counts; what does not fit any more is left out."""
    told, left_out = dict(first.told), {**second.left_out, **first.left_out}
    room = most_bytes - first.num_bytes
    for name, text in second.told.items():
        if name not in told and len(name) + len(text) <= room:
            told[name] = text
            room -= len(name) + len(text)
        elif name not in told:
            left_out[name] = f"did not fit into {most_bytes} bytes"
    return Evidence(told, _few(left_out))


def of_environment(number: int, found: Evidence, most_bytes: int) -> Evidence:
    """``found`` in an episode of this environment, counted from 0."""
    return both(gathered([(ENVIRONMENT, number)], most_bytes), found, most_bytes)


class _Refused:
    """Stands for a value that is not to be kept."""

    def __init__(self, why: str) -> None:
        self.why = why


def _named(instance: object, name: str) -> object:
    """None of the author's code runs: it may block, or change the world."""
    missing = _Refused("the world has no such attribute")
    found = inspect.getattr_static(instance, name, missing)
    return _Refused("is a property") if isinstance(found, property) else getattr(instance, name, missing)


def _unless_secret(name: str, value: object) -> object:
    if isinstance(value, str | bytes) and _SECRET.search(name):
        return _Refused("its name is that of a secret; if it is none, name it in end_state")
    return value


def _is_name(name: object) -> bool:
    return isinstance(name, str) and name.isidentifier()


def _few(left_out: Mapping[str, str]) -> dict[str, str]:
    shown = dict(list(left_out.items())[:MAX_LEFT_OUT])
    if len(left_out) > MAX_LEFT_OUT:
        shown["..."] = f"and {len(left_out) - MAX_LEFT_OUT} more"
    return {name[:MAX_WHY_CHARS]: why[:MAX_WHY_CHARS] for name, why in shown.items()}


def _too_long(most_bytes: int) -> NotPlain:
    return NotPlain(f"has more than the {max(most_bytes, 0)} bytes that are left")


def _tagged(value: object, room: list[int], most: int, depth: int) -> JSON:
    """Types that JSON lacks become an object with one key that begins with ``$``."""
    kind = type(value)
    room[0] -= len(value) if isinstance(value, str | bytes) else 1
    if room[0] < 0:
        raise _too_long(most)
    if depth > _MAX_DEPTH:
        raise NotPlain(f"is nested deeper than {_MAX_DEPTH}")
    if value is None or kind is bool or kind is str or kind is int:
        return value  # type: ignore[return-value]
    if isinstance(value, float) and kind is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, bytes) and kind is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, dict) and kind is dict:
        if all(type(name) is str and not name.startswith("$") for name in value):
            return {
                str(_tagged(name, room, most, depth)): _tagged(one, room, most, depth + 1)
                for name, one in value.items()
            }
        pairs = [[_tagged(one, room, most, depth + 1) for one in pair] for pair in value.items()]
        return {"$dict": pairs}  # type: ignore[dict-item]
    if isinstance(value, list | tuple | set | frozenset) and kind in _SEQUENCES:
        inner: list[JSON] = [_tagged(one, room, most, depth + 1) for one in value]
        return inner if kind is list else {f"${kind.__name__}": inner}
    raise NotPlain(f"is a {kind.__name__}, which is not kept")


_SEQUENCES = (list, tuple, set, frozenset)
_MAKERS: Mapping[str, Callable[..., object]] = {
    "$float": float,
    "$bytes": lambda text: base64.b64decode(text, validate=True),
    "$tuple": tuple,
    "$set": set,
    "$frozenset": frozenset,
    "$dict": dict,
}


def _untagged(value: JSON) -> object:
    if isinstance(value, list):
        return [_untagged(one) for one in value]
    if not isinstance(value, dict):
        return value
    [*names] = value
    if len(names) == 1 and names[0].startswith("$"):
        inner = value[names[0]]
        return _MAKERS[names[0]](inner if isinstance(inner, str) else _untagged(inner))
    return {name: _untagged(one) for name, one in value.items()}
