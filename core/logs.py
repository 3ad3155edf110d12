"""Logs: one JSON object per line with a constant event name and keys; standard library only.

`get_logger("agent").info("wake.begun", instance=..., operation=...)`. Secrets never reach a log: values of
keys in SECRET_KEYS are replaced, and control characters are escaped by JSON itself.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import TextIO

from relight.core.clock import Clock, SystemClock

SECRET_KEYS = frozenset({"token", "grant", "grant_key", "authorization", "key", "password", "secret"})
LEVELS = ("debug", "info", "warning", "error")


class _JsonLines(logging.Formatter):
    def __init__(self, component: str, clock: Clock) -> None:
        super().__init__()
        self._component, self._clock = component, clock

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": round(self._clock.now(), 6),
            "level": record.levelname.lower(),
            "component": self._component,
            "event": record.getMessage(),
        }
        keys = getattr(record, "keys", None)
        if isinstance(keys, dict):
            line.update({k: "***" if k in SECRET_KEYS else v for k, v in keys.items()})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class Logger:
    """A thin face over the standard logger that takes keys."""

    def __init__(self, name: str) -> None:
        self._log = logging.getLogger(f"relight.{name}")

    def debug(self, event: str, **keys: object) -> None:
        self._log.debug(event, extra={"keys": keys})

    def info(self, event: str, **keys: object) -> None:
        self._log.info(event, extra={"keys": keys})

    def warning(self, event: str, **keys: object) -> None:
        self._log.warning(event, extra={"keys": keys})

    def error(self, event: str, **keys: object) -> None:
        self._log.error(event, extra={"keys": keys})

    def exception(self, event: str, **keys: object) -> None:
        """As `error`, with the exception being handled."""
        self._log.error(event, extra={"keys": keys}, exc_info=True)


def get_logger(name: str) -> Logger:
    """The logger of one module, below `relight`."""
    return Logger(name)


def configure(component: str, *, level: str = "info", stream: TextIO | None = None, clock: Clock | None = None) -> None:
    """Sends all of Relight's logs of this process to `stream` (standard error) as JSON lines."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_JsonLines(component, clock or SystemClock()))
    root = logging.getLogger("relight")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False
