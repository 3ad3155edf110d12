"""`make test-engines`: engines by contract, by doubles and for real; the last line of the output is JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
ELSEWHERE = (
    *(f"tests/unit/agent/test_{name}.py" for name in ("accelerators", "capabilities", "devices", "versions")),
    "tests/unit/test_locks.py", "tests/unit/transfer/test_topology.py", "tests/unit/controller/test_doctor.py",
    "tests/integration/controller/test_doctor.py",
)  # fmt: skip
"""Tests beside this folder that record what figures.py counts; they run with every change besides."""


class Seen:
    """What passing tests recorded, each value once."""

    def __init__(self) -> None:
        self.by_name: dict[str, set[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            for name, value in report.user_properties:
                self.by_name.setdefault(name, set()).add(str(value))


def main() -> int:
    seen = Seen()
    elsewhere = [str(ROOT / name) for name in ELSEWHERE]
    status = pytest.main(["--durations=5", str(FOLDER), *elsewhere], plugins=[seen])
    # Only now: pytest has put the tests' own folder on the path.
    from tests.engines.figures import line, short

    lacking = short(seen.by_name)
    for why in lacking:
        print(f"too little: {why}", file=sys.stderr)
    print(json.dumps(line(seen.by_name)))
    return int(status) or int(bool(lacking))


if __name__ == "__main__":
    raise SystemExit(main())
