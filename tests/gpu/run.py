"""`make test-gpu`: whatever of the checks on GPUs this machine allows, and what it lacks for the others.

The last line of the output is JSON: `ran`, `missing` (with the reason), `failed`. RELIGHT_GPU_PYTHON names an
interpreter with PyTorch, and for the checks of engines vLLM, built for GPUs; the engine environment is one for the CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("RELIGHT_GPU_PYTHON", "")
MODEL = Path(os.environ.get("RELIGHT_GPU_MODEL", ROOT / ".cache" / "smollm2"))
_TORCH = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
_VLLM = "from importlib.metadata import version; print(version('vllm'))"


@dataclass(frozen=True)
class Check:
    """`command` ends with 0 when all holds; `lacks` says why it cannot run here, or nothing."""

    name: str
    seconds: float
    command: tuple[str, ...]
    lacks: Callable[[], str]


def said(*argv: str) -> str:
    """What a command prints; empty when it fails, or is not there."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def gpus() -> int:
    return said("nvidia-smi", "-L").count("GPU ")


def no_torch() -> str:
    if not gpus():
        return "no GPU: nvidia-smi shows none"
    if not PYTHON:
        return "no PyTorch for GPUs: RELIGHT_GPU_PYTHON names no interpreter"
    return "" if int(said(PYTHON, "-c", _TORCH) or 0) else f"the PyTorch of {PYTHON} sees no GPU"


def no_vllm() -> str:
    if why := no_torch():
        return why
    if not said(PYTHON, "-c", _VLLM):
        return f"{PYTHON} has no vLLM"
    return "" if (MODEL / "config.json").is_file() else f"no model in {MODEL}: RELIGHT_GPU_MODEL names one"


def no_pair() -> str:
    found = gpus()
    return "" if found > 1 else f"two GPUs of one node are needed, there are {found}"


def pytest(file: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "pytest", "-m", "gpu", f"tests/gpu/{file}")


CHECKS = (
    Check("nvml", 120, (sys.executable, "-m", "tests.gpu.nvml_check"), no_torch),
    Check("memory", 480, (PYTHON, "-m", "tests.gpu.memory_check"), no_torch),
    Check("engine", 480, (sys.executable, "-m", "tests.gpu.engine_check"), no_vllm),
    Check("peers", 480, (sys.executable, "-m", "tests.gpu.peers_check"), no_vllm),
    Check("graphs", 1800, pytest("test_graphs.py"), no_vllm),
    Check("nvlink", 600, pytest("test_nvlink.py"), no_pair),
)


def main() -> int:
    wanted = sys.argv[1:] or [check.name for check in CHECKS]
    ran, missing, failed = [], {}, []
    env = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    for check in CHECKS:
        if check.name not in wanted:
            continue
        if why := check.lacks():
            missing[check.name] = why
            continue
        print(f"== {check.name}", flush=True)
        ran.append(check.name)
        try:
            done = subprocess.run(check.command, env=env, cwd=ROOT, timeout=check.seconds, check=False)
            if done.returncode:
                failed.append(check.name)
        except subprocess.TimeoutExpired:
            failed.append(f"{check.name}: not done after {check.seconds:.0f} s")
    for name, why in missing.items():
        print(f"missing for {name}: {why}", file=sys.stderr)
    print(json.dumps({"ran": ran, "missing": missing, "failed": failed}))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
