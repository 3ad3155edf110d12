"""What vLLM is told differently on each kind of device: arguments, environment, and what it cannot do there. No I/O."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from relight.core.errors import FieldError

CACHE_BYTES = "--kv-cache-memory-bytes"
COMPILATION = "--compilation-config"
SLEEP_MODE = "--enable-sleep-mode"
_SHARED = (SLEEP_MODE, "--gpu-memory-utilization", "0.01")
"""The share of the device is only compared with what is free, and refuses a start beside others that are awake; how
large the cache is says CACHE_BYTES."""
KUNLUN_SLEEPS = (0, 25, 1)
"""From this version of vllm-kunlun on it has an allocator that can give memory back."""


@dataclass(frozen=True, slots=True)
class Place:
    """One kind of device.

    `environment` lies below the model's own. `plugins` are those that vLLM loads there, all others left out. `inside`:
    a part of Relight runs in its workers and moves weights itself; `awaits`: also those of a start, which waits for
    them; `graphs`: it captures some late. `adapters`: what it has loaded of them outlives a sleep.
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    plugins: tuple[str, ...] = ("relight",)
    inside: bool = False
    awaits: bool = False
    graphs: bool = False
    adapters: bool = False
    compiles: bool = True
    """Whether what it compiles can be carried to others."""
    no_zygote: str = ""
    owned: tuple[str, ...] = ()
    """Arguments that are Relight's own there, besides those that are everywhere."""
    removed: tuple[str, ...] = ()
    """Variables that an engine must not inherit."""


PLACES: Mapping[str, Place] = {
    "cpu": Place(
        ("--worker-cls", "relight.plugin.vllm.worker.RelightCPUWorker", "--load-format", "relight"),
        {"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        inside=True,
        awaits=True,
        adapters=True,
    ),
    "nvidia": Place(
        ("--worker-cls", "relight.plugin.vllm.gpu_worker.RelightGPUWorker", *_SHARED),
        {},
        inside=True,
        graphs=True,
        owned=("--gpu-memory-utilization",),
    ),
    "kunlun": Place(
        _SHARED,
        {
            "CUDA_DEVICE_ORDER": "OAM_ID", "CUDA_FAKE_UVA_ENABLE": "1", "CUDA_GRAPH_OPTIMIZE_STREAM": "1",
            "XFT_USE_FAST_SWIGLU": "1", "XMLIR_CUDNN_ENABLED": "1", "XMLIR_DYNAMO_WORKAROUND": "1",
            "XMLIR_ENABLE_MOCK_TORCH_COMPILE": "false", "XMLIR_FORCE_USE_XPU_GRAPH": "1",
            "XPU_USE_DEFAULT_CTX": "1", "XPU_USE_FAST_SWIGLU": "1",
        },
        # Relight's own would import modules of vLLM that the platform's plugin has to replace before anybody does.
        plugins=("kunlun", "kunlun_model", "kunlun_quant", "kunlun_reasoning_parser", "kunlun_tool_parser"),
        compiles=False,
        no_zygote="vllm-kunlun replaces modules of vllm as they are imported: nothing may be imported before it",
        owned=("--gpu-memory-utilization",),
        removed=("XPU_DUMMY_EVENT",),
    ),
}  # fmt: skip


def place(kinds: Iterable[str]) -> tuple[str, Place]:
    """Of devices of one kind; without any it is the CPU."""
    kind = next(iter(kinds), "cpu")
    return kind, PLACES.get(kind, PLACES["nvidia"])


def wrong(kind: str, arguments: Sequence[str]) -> list[FieldError]:
    """What a model's arguments lack or say that cannot come true on this kind of device."""
    if kind == "cpu":
        return []
    found = []
    if not any(argument.partition("=")[0] == CACHE_BYTES for argument in arguments):
        # Otherwise the cache is sized by what is free, and so by what neighbours do in that moment.
        expected = f"{CACHE_BYTES}=BYTES: what neighbours hold while it starts must not decide it"
        found.append(FieldError("args", expected, "none"))
    if kind == "kunlun":
        mode = _compilation(arguments)[1].get("cudagraph_mode", "PIECEWISE")
        if mode not in ("PIECEWISE", "NONE"):
            found.append(FieldError("args", "graphs by pieces alone (PIECEWISE) on Kunlun", f"{COMPILATION} {mode}"))
    return found


def arranged(kind: str, arguments: Sequence[str]) -> tuple[str, ...]:
    """The model's arguments as they are said on this kind of device."""
    if kind != "kunlun":
        return tuple(arguments)
    others, said = _compilation(arguments)
    text = json.dumps({"cudagraph_mode": "PIECEWISE", **said}, separators=(",", ":"))
    return (*others, COMPILATION, text)


def _compilation(arguments: Sequence[str]) -> tuple[list[str], dict[str, object]]:
    """The other arguments, and what was said of compilation as JSON."""
    others: list[str] = []
    said: dict[str, object] = {}
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if name not in (COMPILATION, "-cc"):
            others.append(argument)
            continue
        try:
            given = json.loads(value if equals else next(rest, ""))
        except ValueError:
            given = None
        if isinstance(given, dict):
            said |= given
        else:
            others.append(argument)
    return others, said


def sleeps(kind: str, versions: Mapping[str, str]) -> str:
    """Why an engine there cannot sleep; empty when it can."""
    if kind != "kunlun":
        return ""
    installed = versions.get("vllm-kunlun", "")
    numbers = tuple(int(n) for n in re.findall(r"\d+", installed)[:3])
    if numbers >= KUNLUN_SLEEPS:
        return ""
    least = ".".join(map(str, KUNLUN_SLEEPS))
    return f"vllm-kunlun {installed or 'of an unknown version'} gives no memory back: guardians need {least}"
