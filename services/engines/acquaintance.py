"""Whether engines answer, take the keys that a process has for them, and are closed to others. For ``gspo doctor``.

Rule: nothing in an engine changes. An engine that is away is no fault of this machine; one that refuses our key, and an
address where something else answers, is.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pydantic import SecretStr

from services.engines import quantization
from services.engines.keys import EngineKeys, warning
from services.engines.kinds import open_engines
from services.engines.protocol import (
    Connect,
    EngineError,
    EngineKeyRefused,
    EngineProtocolError,
    EngineRejected,
    NoSuchKind,
)

_ANSWER_S = 5.0


class Acquaintance(StrEnum):
    FINE = "fine"
    AWAY = "away"
    UNGUARDED = "unguarded"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Known:
    acquaintance: Acquaintance
    text: str


async def acquaint(urls: Sequence[str], keys: Iterable[SecretStr]) -> list[Known]:
    async with open_engines(EngineKeys.read(keys)) as connect:
        return await asyncio.gather(*(_acquaint(url, connect) for url in urls))


async def _acquaint(url: str, connect: Connect) -> Known:
    try:
        async with asyncio.timeout(_ANSWER_S):
            engine = connect(url)
            capabilities = await engine.capabilities()
            if not capabilities.names_versions:
                why = f"{url} is {capabilities.software}, which does not report which weights sampled a token"
                return Known(Acquaintance.REFUSED, f"{why} ({capabilities.advice})")
            if capabilities.quantization:
                return Known(Acquaintance.REFUSED, f"{url}: {quantization.problem(capabilities.quantization)}")
            await engine.abort(uuid.uuid4().hex)  # a control call that finds nothing to do
    except (NoSuchKind, EngineKeyRefused) as error:
        return Known(Acquaintance.REFUSED, str(error))
    except (EngineProtocolError, EngineRejected) as error:
        return Known(Acquaintance.REFUSED, f"{url} answers, but not as an engine: {error}")
    except (EngineError, TimeoutError) as error:
        return Known(Acquaintance.AWAY, f"{url} does not answer: {error or 'no answer in time'}")
    if capabilities.is_unguarded:
        return Known(Acquaintance.UNGUARDED, warning(url))
    return Known(Acquaintance.FINE, f"{url} is {capabilities.software}")
