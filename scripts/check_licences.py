"""Fails when a distribution of the control environment has a licence that is not on the list."""

from __future__ import annotations

import json
import subprocess
import sys

ALLOWED = (
    "apache", "mit", "bsd", "isc", "python software foundation", "psf-2.0", "mpl-2.0", "mozilla public license 2.0",
    "unlicense", "public domain", "0bsd",
)  # fmt: skip
OURS = {"relight"}


def main() -> int:
    done = subprocess.run(
        [sys.executable, "-m", "piplicenses", "--format=json", "--from=mixed", "--with-system"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    found = [p for p in json.loads(done.stdout) if p["Name"] not in OURS]
    odd = [p for p in found if not any(name in p["License"].lower() for name in ALLOWED)]
    for package in odd:
        print(f"licence not on the list: {package['Name']} {package['Version']}: {package['License']}", file=sys.stderr)
    print(f"licences: {len(found)} distributions, {len(odd)} not on the list")
    return 1 if odd else 0


if __name__ == "__main__":
    raise SystemExit(main())
