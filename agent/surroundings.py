"""Where this slot's engines run, as it looks from there: its variables, and short questions to its interpreters.

An agent and its engines may live in containers of their own, with a filesystem each. What the supervisor sees is what
engines see; so all that has to be known of their side is asked through it, in one container or in two.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from relight.agent.engines.base import EngineCommand
from relight.agent.link import SupervisorLink
from relight.agent.supervisor.client import Exit, Running
from relight.core.errors import InvalidInput, Unavailable
from relight.core.logs import get_logger

_log = get_logger("agent.surroundings")
PREFIX = "ask-"
ASK_SECONDS = 60.0
"""How long an interpreter may take to answer: it starts from a disk that may be cold."""
MAX_ANSWER = 1 << 20
_TAIL = 300
_ON_A_HOST = ("PATH", "LANG", "TZ", "TMPDIR")
"""The compiler and its tools are found by PATH; nothing else of whoever started the agent goes along."""
_OWN = "RELIGHT_"


class Surroundings:
    """One per agent. `here` says that engines see this process's own files."""

    def __init__(self, link: SupervisorLink, directory: Path, *, here: bool) -> None:
        """`directory` is one that both sides see; questions and answers lie there for as long as they take."""
        self._link, self._directory, self.here = link, directory, here
        self._numbers = itertools.count(1)
        self._open: dict[str, asyncio.Future[Exit]] = {}
        self.variables: Mapping[str, str] = {}
        """What every process of an engine inherits: of a container all that its image and its pod give it."""

    async def learn(self) -> None:
        """Reads the variables, once the supervisor is there. Raises Unavailable."""
        try:
            found = await self._link.environment()
        except InvalidInput as error:
            # One from before it could be asked: its engines go on with what their agent has.
            _log.warning("supervisor.older", reason=str(error))
            found = dict(os.environ)
        self.variables = {
            name: value
            for name, value in found.items()
            if (name in _ON_A_HOST if self.here else not name.startswith(_OWN))
        }

    async def ask(self, python: str, question: Mapping[str, Any]) -> Any:
        """What `relight.plugin.look` answers there. Raises InvalidInput when `python` cannot answer, Unavailable."""
        name = f"{PREFIX}{next(self._numbers)}"
        log = self._directory / f"{name}.out"
        argv = (python, "-m", "relight.plugin.look", json.dumps(question))
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
        ended = self._open[name] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(ASK_SECONDS):
                await self._link.spawn(name, EngineCommand(argv, self.variables, self._directory), log)
                exit_ = await ended
            text = await asyncio.to_thread(_read, log)
        except TimeoutError:
            raise Unavailable(f"{python} did not answer within {ASK_SECONDS:.0f} s", retry_after=1.0) from None
        finally:
            self._open.pop(name, None)
            if not ended.done():
                await self._link.end(name, 0)
            log.unlink(missing_ok=True)
        lines = text.strip().splitlines()
        if exit_.code == 0 and lines:
            try:
                return json.loads(lines[-1])
            except ValueError:
                pass
        raise InvalidInput(f"{python} cannot be asked: {exit_.reason}: {text.strip()[-_TAIL:] or 'it said nothing'}")

    def on_exit(self, exit_: Exit) -> bool:
        """Whether what ended was a question."""
        if not exit_.instance.startswith(PREFIX):
            return False
        waiting = self._open.get(exit_.instance)
        if waiting is not None and not waiting.done():
            waiting.set_result(exit_)
        return True

    async def take_over(self, running: Iterable[Running]) -> tuple[Running, ...]:
        """Those of `running` that are no questions; what an earlier agent asked is ended."""
        others = []
        for process in running:
            if process.instance.startswith(PREFIX):
                await self._link.end(process.instance, 0)
            else:
                others.append(process)
        return tuple(others)


def _read(log: Path) -> str:
    with log.open("rb") as file:
        return file.read(MAX_ANSWER).decode(errors="replace")
