"""``python -m services.trainer.attempt_main``: the process of one attempt, started before it has a job.

It does the slow imports, reports that it is ready, reads its job from standard input, runs the attempt, writes the
outcome to standard output, and exits immediately, taking any remaining threads and device work with it.

Rule: ignore SIGTERM and SIGINT. The trainer handles signals sent to the whole process group and sends orders here. This
process exits when the trainer is gone.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import sys
import threading
from typing import BinaryIO, NoReturn

from services.process.own_secrets import hide_secrets
from services.process.settings import Settings, load_settings
from services.process.telemetry import configure_logging
from services.trainer.telling.attempt_messages import (
    Alive,
    Answer,
    AttemptEnd,
    Begin,
    Leave,
    Order,
    Ready,
    Stop,
    decode_order,
    encode,
)

ALIVE_S = 2.0
_MAX_MESSAGE = 20_000


def main() -> NoReturn:
    for number in (signal.SIGTERM, signal.SIGINT):
        # Not SIG_IGN: child processes would inherit it.
        signal.signal(number, lambda *_: None)
    # Keep library output on stdout from mixing with the answers.
    answers = os.fdopen(os.dup(1), "wb", 0)
    os.dup2(2, 1)
    faulthandler.enable()
    hide_secrets()
    settings = load_settings()
    configure_logging("trainer", level=settings.log_level, log_format=settings.log_format)
    asyncio.run(_serve(settings, answers))
    raise AssertionError("the process has ended")


async def _serve(settings: Settings, answers: BinaryIO) -> NoReturn:
    import torch

    from services.trainer.attempt import run_attempt
    from services.trainer.building import capabilities

    # OMP_NUM_THREADS sizes the intra-op pool; a second pool would compete with it.
    torch.set_num_interop_threads(1)
    orders: asyncio.Queue[Order] = asyncio.Queue()
    threading.Thread(target=_hear, args=(asyncio.get_running_loop(), orders), name="orders", daemon=True).start()
    _tell(answers, Ready(capabilities()))
    begin = await orders.get()
    assert isinstance(begin, Begin), begin
    stop, leaving = asyncio.Event(), asyncio.Event()
    beside = [asyncio.create_task(_show_life(answers)), asyncio.create_task(_obey(orders, stop, leaving))]
    end = await run_attempt(settings, begin.claim, stop, leaving)
    for task in beside:
        task.cancel()
    _tell(answers, AttemptEnd(end.how, end.code, end.message[:_MAX_MESSAGE]))
    _leave(0)


def _hear(loop: asyncio.AbstractEventLoop, orders: asyncio.Queue[Order]) -> None:
    """Read orders in a thread, to notice the end of the trainer even while the event loop is busy."""
    for line in os.fdopen(0, "rb"):
        loop.call_soon_threadsafe(orders.put_nowait, decode_order(line))
    _leave(1)


async def _obey(orders: asyncio.Queue[Order], stop: asyncio.Event, leaving: asyncio.Event) -> None:
    while True:
        match await orders.get():
            case Stop():
                stop.set()
            case Leave():
                leaving.set()
            case Begin():
                raise AssertionError("one attempt a process")


async def _show_life(answers: BinaryIO) -> None:
    while True:
        _tell(answers, Alive())
        await asyncio.sleep(ALIVE_S)


def _tell(answers: BinaryIO, answer: Answer) -> None:
    try:
        answers.write(encode(answer))
    except BrokenPipeError:
        _leave(1)


def _leave(status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
