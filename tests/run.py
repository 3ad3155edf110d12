"""`make test`: the tests with real engines beside all the others, each half in a pytest of its own.

Engines are waited for most of the time, and so are processes and networks: two cores serve both halves in little more
than the time of the longer one. What the second half prints follows the first's.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
ELSEWHERE = "not gpu and not kubernetes and not chart and not dashboards and not engines"
"""Each has a target of its own."""
HALVES = (f"not engine and {ELSEWHERE}", f"engine and {ELSEWHERE}")


def _pytest(marks: str, said: IO[bytes] | None) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "pytest", "-m", marks, "--durations=10"]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=said, stderr=said)


def main() -> int:
    with tempfile.TemporaryFile() as said:
        engines = _pytest(HALVES[1], said)
        others = _pytest(HALVES[0], None)
        try:
            results = [others.wait(), engines.wait()]
        finally:
            for process in (others, engines):
                if process.poll() is None:
                    process.send_signal(signal.SIGINT)
                    process.wait()
            said.seek(0)
            sys.stdout.buffer.write(said.read())
            sys.stdout.flush()
    # One that a signal ended has a negative status: any but 0 is a failure.
    return int(any(results))


if __name__ == "__main__":
    raise SystemExit(main())
