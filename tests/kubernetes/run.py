"""`make test-kubernetes`: the tests that need a control plane; the last line of the output is JSON: checks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


class Count:
    """How many tests passed."""

    def __init__(self) -> None:
        self.passed = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed += report.when == "call" and report.passed


def main() -> int:
    count = Count()
    status = pytest.main(["-m", "kubernetes", "--durations=5", str(FOLDER)], plugins=[count])
    print(json.dumps({"checks": count.passed}))
    return int(status)


if __name__ == "__main__":
    raise SystemExit(main())
