"""The process: takes SGLang's arguments, answers its HTTP. Memory is real, tokens follow from what lies in it."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from relight.agent.engines.stub_http import serve_connection

from .http import Server
from .scheduler import Scheduler
from .tokenizer import Tokenizer


@dataclass(frozen=True)
class Oddities:
    """What a test wants to go wrong, as JSON in SGLANG_DOUBLE."""

    start_error: str = ""
    never_ready: bool = False
    token_seconds: float = 0.0
    hang_after: int | None = None
    """So many requests are answered, then none makes progress any more."""
    backup_flips: bool = False
    """The host copy of the weights comes back with one byte changed."""
    no_saver: bool = False
    """The memory saver could not be installed: everything answers, nothing is given back."""
    refuses_reload: int = 0
    """So many reloads are refused."""
    loads_by: str = ""
    """What it says that it loaded its weights by, whatever it was told."""
    hangs_in: str = ""
    """A route that is never answered, and does nothing."""
    dies_in: str = ""
    """A route that the process dies in instead of answering it."""


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("config", "model-path", "host", "served-model-name", "weight-version", "admin-api-key", "load-format",
                 "remote-instance-weight-loader-backend", "dtype", "context-length"):  # fmt: skip
        parser.add_argument(f"--{name}")
    for name in ("port", "tp-size", "ep-size"):
        parser.add_argument(f"--{name}", type=int, default=1)
    for name in ("enable-memory-saver", "enable-weights-cpu-backup", "disable-cuda-graph"):
        parser.add_argument(f"--{name}", action="store_true")
    found = parser.parse_args(argv)
    if found.config:
        # One mapping of arguments, which those of the command line override.
        for line in Path(found.config).read_text().splitlines():
            key, _, value = line.partition(":")
            name = key.strip().replace("-", "_")
            if getattr(found, name) is None:
                setattr(found, name, value.strip())
    found.load_format = found.load_format or "auto"
    if found.load_format == "remote_instance" and found.enable_memory_saver:
        print("WARNING Fallback load_format to 'auto' due to 'transfer_engine' backend is not supported.", flush=True)
        found.load_format = "auto"
    return found


async def _run(arguments: argparse.Namespace, odd: Oddities) -> None:
    arguments.load_format = odd.loads_by or arguments.load_format
    if odd.start_error:
        raise SystemExit(odd.start_error)
    scheduler = Scheduler(arguments, odd, Path.cwd() / "double")
    tokenizer = Tokenizer(scheduler)
    server = Server(arguments, odd, scheduler, tokenizer)
    listening = await asyncio.start_server(
        lambda r, w: serve_connection(r, w, server.answer), arguments.host, arguments.port, limit=1 << 20
    )
    if not odd.never_ready:
        tokenizer.status = "Up"
    async with listening:
        await scheduler.loop()


def main() -> None:
    """Runs until it is killed, or kills itself as SGLang does when one of its processes fails."""
    said: dict[str, Any] = json.loads(os.environ.get("SGLANG_DOUBLE", "{}"))
    odd = Oddities(**{f.name: said[f.name] for f in fields(Oddities) if f.name in said})
    # Its scheduler and its detokenizer are processes of their own: whoever ends it ends these too.
    subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"])
    asyncio.run(_run(_arguments(sys.argv[1:]), odd))


if __name__ == "__main__":
    main()
