"""A real Redis server on a unix socket, which tests start, kill and start again."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import redis

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import redis_server  # noqa: E402 - scripts/ is no package

START_SECONDS = 20.0


class RedisServer:
    """One server process at a time over one folder; its socket lies in a short path, as sockets must."""

    def __init__(self, *options: str, file: Path | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="redis-"))
        self.socket = self.folder / "s"
        self.url = f"unix://{self.socket}"
        self._options, self._file = options, [str(file)] if file else []
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Starts it over what it wrote before, and waits until it answers."""
        program, environment = redis_server.server(ROOT / ".cache" / "redis")
        if not Path(program).exists():
            raise FileNotFoundError(f"no Redis server at {program}: run `make setup-redis`")
        command = [
            "setpriv", "--pdeathsig", "KILL", program, *self._file, "--port", "0", "--unixsocket", str(self.socket),
            "--dir", str(self.folder), "--appendonly", "yes", "--appendfsync", "always", "--save", "",
            "--logfile", str(self.folder / "log"), *self._options,
        ]  # fmt: skip
        self._process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
        until = time.monotonic() + START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > until:
                log = self.folder / "log"
                self.close(keep=True)
                raise RuntimeError(f"the Redis server does not answer:\n{log.read_text() if log.exists() else ''}")
            time.sleep(0.01)

    def _answers(self) -> bool:
        try:
            return bool(self.client().ping())
        except (redis.exceptions.AuthenticationError, redis.exceptions.ResponseError):
            return True
        except redis.RedisError:
            return False

    def client(self) -> redis.Redis:
        """Speaks to it beside the store."""
        return redis.Redis.from_url(self.url)

    def kill(self) -> None:
        """It is gone, as by a power failure of its own."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=10)
            self._process = None

    def pause(self) -> None:
        """It holds its connections and answers nobody."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """It goes on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def close(self, *, keep: bool = False) -> None:
        """Ends it and removes its folder."""
        self.kill()
        if not keep:
            shutil.rmtree(self.folder)
