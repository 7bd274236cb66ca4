"""Logging: one JSON object a line (or coloured columns on a terminal), static event names.

`log.info("lease.granted", address=...)`: the event never contains data, the facts are keys.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import msgspec
import structlog

from services.kit.config import LogSettings

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


def _dumps(event: object, default: Any = None) -> bytes:
    return msgspec.json.encode(event, enc_hook=str)


def setup(settings: LogSettings, service: str) -> None:
    """Configure structlog for this process; logs go to standard error."""
    level = LEVELS[settings.level]
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    console = settings.format == "console" or (settings.format == "auto" and sys.stderr.isatty())
    if console:
        processors = [
            *shared,
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(),
                # The default shows the local variables of every frame, secrets among them.
                exception_formatter=structlog.dev.plain_traceback,
            ),
        ]
        factory: Any = structlog.WriteLoggerFactory(file=sys.stderr)
    else:
        processors = [
            *shared,
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(serializer=_dumps),
        ]
        factory = structlog.BytesLoggerFactory(file=sys.stderr.buffer)
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=factory,
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)
    # Libraries: warnings only. The Azure SDK logs whole URLs (with subscription ids) at info.
    logging.basicConfig(level=max(level, logging.WARNING), stream=sys.stderr, force=True)
    logging.getLogger("azure").setLevel(logging.ERROR)
    logging.getLogger("nats").setLevel(logging.CRITICAL)  # kit.bus reports the connection itself
