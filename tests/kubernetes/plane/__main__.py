"""A control plane to work with: `.venv/bin/python -m tests.kubernetes.plane up`, until it is interrupted."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType

from tests.kubernetes.plane import BINARIES, ControlPlane, PlaneError


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def up(run_dir: Path, nodes: int, gpus: int) -> None:
    """Runs it until interrupted."""
    with ControlPlane.start(run_dir) as plane:
        for number in range(nodes):
            plane.hollow_node(f"node-{number}", capacity={"nvidia.com/gpu": gpus})
        print(plane.report())
        print(f"logs, audit and certificates lie below {run_dir}; end it with an interrupt (Ctrl-C)")
        print(f"export PATH={BINARIES}:$PATH KUBECONFIG={plane.admin.kubeconfig}", flush=True)
        signal.pause()


def main() -> int:
    """0 when it was interrupted, 1 when it did not come up."""
    parser = argparse.ArgumentParser(prog="python -m tests.kubernetes.plane", description=__doc__)
    parser.add_argument("command", choices=["up"])
    parser.add_argument("--run-dir", type=Path, help="where its files lie (default: a temporary folder)")
    parser.add_argument("--nodes", type=int, default=1, help="hollow nodes (default: 1)")
    parser.add_argument("--gpus", type=int, default=8, help="of each node (default: 8)")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with tempfile.TemporaryDirectory(prefix="plane-") as temporary:
            up(arguments.run_dir or Path(temporary), arguments.nodes, arguments.gpus)
    except PlaneError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("ended")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
