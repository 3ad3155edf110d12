"""`make test-nixl`: the nixl transport over the real library, between processes, memory to memory over UCX.

The last line of the output is JSON: verified_bytes, failures_handled, path.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
SECONDS = 120.0
"""For all of it; processes that take longer are ended."""
PATHS = {"tcp": "tcp", "shm": "posix,cma,tcp"}
"""By name: UCX_TLS. Neither is for production (transfer/transports/nixl_agent.py says why)."""


class End:
    """One process; its answers are lines that begin with @."""

    def __init__(self, role: str, transports: str) -> None:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT / ".cache" / "peers", ROOT / "src"))),
            "UCX_LOG_LEVEL": "error",
        }
        self.process = subprocess.Popen(
            [ROOT / ".venv-engine/bin/python", ROOT / "tests/nixl/ends.py", role, transports],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        self.role = role
        self._hear()

    def _hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@"):
                return dict(json.loads(line[1:]))
        return {"died": self.process.wait()}

    def tell(self, name: str, **words: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps([name, words]) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return {"died": self.process.wait()}
        return self._hear()

    def end(self) -> int:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        return self.process.wait(timeout=10)


class Judge:
    """Counts what was verified and which failures ended as they have to."""

    def __init__(self) -> None:
        self.verified = 0
        self.handled: list[str] = []
        self.wrong: list[str] = []

    def check(self, true: bool, otherwise: object) -> bool:
        if not true:
            self.wrong.append(str(otherwise))
        return true

    def refilled(self, step: str, got: dict[str, Any], by: str = "i-source by nixl") -> None:
        print(f"{step:<16} {got}")
        good = got.get("same") is True and got.get("holders", {}).get(by, 0) > 0
        if self.check(good and got["completed"] >= got["holders"]["i-source by nixl"], f"{step}: {got}"):
            self.verified += got["bytes"]

    def failed(self, step: str, got: object, *, well: bool) -> None:
        print(f"{step:<16} {got}")
        if self.check(well, f"{step}: {got}"):
            self.handled.append(step)


class Run:
    """All steps over one of UCX's ways."""

    def __init__(self, judge: Judge, name: str, started: list[End]) -> None:
        self._judge, self._name, self._started = judge, name, started
        self._source, self._receiver = self._start("source"), self._start("receiver")

    def _start(self, role: str) -> End:
        self._started.append(End(role, PATHS[self._name]))
        return self._started[-1]

    def all(self) -> None:
        awake = self._source.tell("wake")
        self._judge.refilled("first", self._receiver.tell("refill", source=awake))
        awake = self._renewed(awake)
        if self._name == "tcp":
            # Over shm the reader takes the bytes alone: nothing can stall there, and metadata is the same.
            self._hostile()
            awake = self._stopped(awake)
        else:
            # Over tcp the source sends, and UCX may end its process when a reader is lost while it does.
            self._killed_reader(awake)
        self._killed_source(awake)
        self._judge.check(self._receiver.end() == 0, "the receiver did not leave well")

    def _renewed(self, before: dict[str, Any]) -> dict[str, Any]:
        slept = self._source.tell("sleep")
        self._judge.check(slept == {"cut": 0, "resident": 0}, f"asleep: {slept}")
        awake = self._source.tell("wake")
        stale = self._receiver.tell("refill", source=awake | {"grant": before["grant"]})
        self._judge.failed("stale grant", stale, well="not signed for this source" in stale.get("why", ""))
        self._judge.refilled("renewed", self._receiver.tell("refill", source=awake))
        return awake

    def _hostile(self) -> None:
        marker = ROOT / ".cache" / "nixl-test-unpickled"
        marker.unlink(missing_ok=True)
        bomb = pickle.dumps(_Bomb(str(marker)))
        for name, metadata in {"junk": b"\xff" * 300, "nothing": b"", "pickle": bomb, "huge": bytes(1 << 17)}.items():
            said = self._receiver.tell("hostile", metadata=metadata.hex())
            well = said.get("why", "").startswith("RemoteFault: i-hostile") and not marker.exists()
            self._judge.failed(f"metadata: {name}", said, well=well)

    def _stopped(self, awake: dict[str, Any]) -> dict[str, Any]:
        said = self._receiver.tell("stopped", source=awake)
        well = "stalled" in said.get("why", "") and said["untouched"]
        self._judge.failed("stopped source", said, well=well)
        fresh = self._start("source").tell("wake")
        self._judge.refilled("goes on", self._receiver.tell("refill", source=fresh))
        return fresh

    def _killed_reader(self, awake: dict[str, Any]) -> None:
        reader = self._start("receiver")
        self._judge.check("reading" in reader.tell("begin", source=awake), "the reader to be killed did not read")
        reader.process.kill()
        reader.process.wait()
        after = self._receiver.tell("refill", source=awake)
        self._judge.refilled("after that", after)
        self._judge.failed("killed reader", after.get("same"), well=after.get("same") is True)

    def _killed_source(self, awake: dict[str, Any]) -> None:
        other = self._start("source").tell("wake")
        got = self._receiver.tell("refill", source=awake, reserve=other, kill=True)
        self._judge.refilled("taken over", got, by="i-other by tcp")
        lost = got.get("lost", {})
        self._judge.failed("killed source", lost, well="i-source by nixl" in lost)


class _Bomb:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return open, (self.path, "w")


def main() -> int:
    judge, started, begun = Judge(), list[End](), time.monotonic()

    def give_up() -> None:
        for end in started:
            end.process.kill()

    watch = threading.Timer(SECONDS, give_up)
    watch.start()
    paths = []
    try:
        for name in PATHS:
            print(f"---- over {name}")
            before = judge.verified
            Run(judge, name, started).all()
            if judge.verified > before:
                paths.append(f"nixl over {name}")
    finally:
        watch.cancel()
        give_up()
        for end in started:
            end.process.wait()
    for wrong in judge.wrong:
        print(f"WRONG {wrong}")
    print(f"took {time.monotonic() - begun:.1f} s; handled: {', '.join(judge.handled)}")
    print(
        json.dumps({"verified_bytes": judge.verified, "failures_handled": len(judge.handled), "path": ", ".join(paths)})
    )
    return 1 if judge.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
