"""Ends with 0 when all agrees, 1 when it does not, 2 when it cannot be compared; the last line is JSON.

python -m relight.plugin.golden layers MODEL [--dtype bfloat16] [--with MODULE]
    runs vLLM as it is installed beside the model's own code in float32 on the CPU, and names the first layer that is
    further off than its dtype explains. MODULE is imported first: one that swaps operators or libraries.
python -m relight.plugin.golden tensors DIRECTORY DIRECTORY
    compares every tensor of two running engines of one node, by the directories of their instances.
"""

from __future__ import annotations

import argparse
import importlib
import json
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from relight.core.errors import LocalFault, RelightError
from relight.plugin.golden.judging import TOLERANCE, differing, judge

PROMPT = tuple(3 + (7 * n * n + 11 * n) % 240 for n in range(48))
"""Token ids that every vocabulary has."""
CALL_SECONDS = 120.0


def _layers(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.swapped:
        importlib.import_module(arguments.swapped)
    from relight.plugin.golden import layers

    ours = layers.engine(str(arguments.model), PROMPT, arguments.dtype)
    theirs = layers.reference(str(arguments.model), PROMPT)
    same = int(ours["logits"].argmax()) == int(theirs["logits"].argmax())
    told = judge(arguments.dtype, layers.errors(ours, theirs), same)
    return {**asdict(told), "agree": not told.outside}


def _tensors(arguments: argparse.Namespace) -> dict[str, Any]:
    ours, theirs = (_digests(directory) for directory in (arguments.ours, arguments.theirs))
    found = differing(ours, theirs)
    return {"tensors": len(ours), "differing": found, "agree": not found}


def _digests(directory: Path) -> Mapping[str, str]:
    """Of every rank in an instance's directory, hashed now."""
    found: dict[str, str] = {}
    for path in sorted(directory.glob("worker-*.sock")):
        rank = path.stem.removeprefix("worker-")
        for name, digest in _call(path, "digests").items():
            found[f"rank {rank} {name}"] = digest
    if not found:
        raise LocalFault(f"{directory} is no directory of a running engine: it holds no worker's socket")
    return found


def _call(path: Path, operation: str) -> Any:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(CALL_SECONDS)
        try:
            sock.connect(str(path))
            sock.sendall(json.dumps({"op": operation, "args": {}}).encode() + b"\n")
            with sock.makefile("rb") as lines:
                answer = json.loads(lines.readline())
        except (OSError, ValueError) as error:
            raise LocalFault(f"{path} cannot be asked for {operation}: {error}") from error
    if "ok" not in answer:
        raise LocalFault(f"{path}: {answer.get('error', {}).get('message')}")
    return answer["ok"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m relight.plugin.golden", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    what = parser.add_subparsers(required=True)
    layers = what.add_parser("layers")
    layers.add_argument("model", type=Path)
    layers.add_argument("--dtype", choices=sorted(TOLERANCE), default="bfloat16")
    layers.add_argument("--with", dest="swapped", default="")
    layers.set_defaults(run=_layers)
    tensors = what.add_parser("tensors")
    tensors.add_argument("ours", type=Path)
    tensors.add_argument("theirs", type=Path)
    tensors.set_defaults(run=_tensors)
    arguments = parser.parse_args()
    try:
        said = arguments.run(arguments)
    except RelightError as error:
        print(json.dumps({"agree": False, "error": str(error)}), flush=True)
        return 2
    print(json.dumps(said), flush=True)
    return 0 if said["agree"] else 1


if __name__ == "__main__":
    sys.exit(main())
