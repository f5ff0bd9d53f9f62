"""Turns of keys that just talk: used up before they begin, and given back where they do not.

Rule: a request that is refused, whose client has left, or whose charge was never answered uses nothing up. It decides
upon no request.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Iterator

from services.gateway.dialects.turns import Refusal, RefusalKind
from services.process.telemetry import get_logger
from services.state.client import Away, RedisFault
from services.state.refusals import Fenced, Full, Refused
from services.state.talks import Presented, TalkKeyRecord, Talks


class TalkCharges:
    """Those of one gateway."""

    def __init__(self, talks: Talks) -> None:
        self._talks = talks
        self._giving_back: set[asyncio.Task[None]] = set()

    async def look_up(self, key: str) -> tuple[Presented, TalkKeyRecord]:
        """Raises ``Refusal``."""
        with _as_refusals():
            if (presented := Presented.read(key)) is None:
                raise Fenced("no talk key")
            return presented, await self._talks.use(presented)

    @contextlib.asynccontextmanager
    async def charged(self, presented: Presented) -> AsyncIterator[None]:
        """With a turn of the key, which is given back where what is done inside fails. Raises ``Refusal``."""
        token = secrets.token_hex(8)
        with _as_refusals():
            try:
                await self._talks.use(presented, num_turns=1, token=token)
                yield
            except (Fenced, Full):  # nothing was used up
                raise
            except (Exception, asyncio.CancelledError) as error:  # also where only the reply was lost
                giving_back = self._begin_to_give_back(presented, token)
                if isinstance(error, Refusal):  # its client may ask for another turn at once
                    await asyncio.shield(giving_back)
                raise

    async def close(self) -> None:
        await asyncio.gather(*self._giving_back)

    def _begin_to_give_back(self, presented: Presented, token: str) -> asyncio.Task[None]:
        """It goes on where whoever asked is gone."""
        task = asyncio.create_task(self._give_back(presented, token))
        self._giving_back.add(task)
        task.add_done_callback(self._giving_back.discard)
        return task

    async def _give_back(self, presented: Presented, token: str) -> None:
        try:
            await self._talks.give_back(presented, 1, token)
        except (Away, RedisFault, Refused) as error:  # the client is to hear why it was refused
            get_logger().warning("a turn is not given back", key=presented.id, job=presented.job, error=str(error))


@contextlib.contextmanager
def _as_refusals() -> Iterator[None]:
    """What Redis says of a key, as its client is told."""
    try:
        yield
    except Fenced:
        raise unknown_key() from None
    except Full as full:
        raise used_up(full.detail) from None
    except Away:
        raise Refusal(RefusalKind.AWAY, "keys cannot be looked up at the moment; ask again") from None


def unknown_key() -> Refusal:
    return Refusal(RefusalKind.UNKNOWN_KEY, "this key is not known, or was revoked")


def used_up(what: str) -> Refusal:
    """``what``: as ``Full`` names it."""
    return Refusal(RefusalKind.OVER_BUDGET, f"this key has used up its {'seconds' if what == 'ms' else what}")
