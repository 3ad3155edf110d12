"""The one place where NVIDIA's management library is loaded: only where a slot is of that kind."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from relight.core.errors import Unavailable


def load() -> Any:
    """The module pynvml, initialised. Raises Unavailable with what is missing, or with the driver's own word."""
    try:
        nvml: Any = import_module("pynvml")
    except ImportError as error:
        raise Unavailable(f"NVIDIA devices need the package nvidia-ml-py: {error}") from error
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise Unavailable(f"NVIDIA's driver does not answer: {error}") from error
    return nvml
