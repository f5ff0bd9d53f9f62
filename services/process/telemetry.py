"""How every service logs: one structured line per fact, readable on a terminal and JSON everywhere else.

Rule: the identity of a process (its service name and id) is bound once at start-up, so no line can lack it.
Lines go to stderr; stdout is for a command's user. This module measures and exports nothing.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Literal, TextIO

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger


def configure_logging(
    service: str,
    *,
    level: str = "info",
    log_format: Literal["console", "json"] | None = None,
    stream: TextIO | None = None,
    **identity: str | int,
) -> None:
    """Set up logging for this process; ``service`` and ``identity`` appear in every later line.

    Without a ``log_format`` a terminal gets text and everything else JSON.
    """
    output = stream or sys.stderr
    rendering: list[Processor] = (
        [_console(output)]
        if log_format == "console" or (log_format is None and output.isatty())
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    )

    def add_identity(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        return {"service": service, **identity, **event}

    structlog.configure(
        processors=[
            add_identity,
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *rendering,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=output),
    )
    # Warnings that libraries log through the standard module join the same stream.
    logging.basicConfig(level=logging.WARNING, stream=output, format="%(levelname)s %(name)s: %(message)s", force=True)


def _console(output: TextIO) -> Processor:
    # The default formatter would print local variables, keys and tokens among them.
    return structlog.dev.ConsoleRenderer(colors=output.isatty(), exception_formatter=structlog.dev.plain_traceback)


def get_logger() -> FilteringBoundLogger:
    """A logger; cheap, and usable before ``configure_logging``."""
    logger: FilteringBoundLogger = structlog.get_logger()
    return logger


def tell_unread_settings() -> None:
    """For the start of a service: variables that look like its settings, and that nothing reads."""
    from services.process.settings import unread_names  # late: logging alone needs no settings

    if unread := unread_names(os.environ):
        get_logger().warning("variables are set that nothing reads", names=unread)
