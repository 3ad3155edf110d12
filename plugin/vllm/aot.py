"""A cure for vLLM 0.32.0 on the CPU, which writes an AOT artefact at each cold start and then fails to load it.

vLLM finishes what it loads by `compiled_fn.finalize_loading(config)`, a method of its own backend's functions. On the
CPU the backend is plain Inductor, whose function lacks it: "Compiling model again due to a load failure", at every
start (vllm/compilation/decorators.py, `_try_load_aot_compiled_fn`). There is nothing to finish for such a function. So
it is given a method that does nothing, where it is loaded; vLLM's own checks, counters, log and errors stay.
"""

from __future__ import annotations

from typing import Any

import torch

_MARK = "_relight_finishes"


def cure() -> None:
    """Repeatable. A release whose functions have the method, or that loads otherwise, is left as it is."""
    loading = getattr(torch.compiler, "load_compiled_function", None)
    if loading is None or getattr(loading, _MARK, False):
        return

    def load_compiled_function(*arguments: Any, **options: Any) -> Any:
        loaded = loading(*arguments, **options)
        inner = getattr(getattr(loaded, "_artifacts", None), "compiled_fn", None)
        if inner is not None and not hasattr(inner, "finalize_loading"):
            inner.finalize_loading = _nothing_left
        return loaded

    setattr(load_compiled_function, _MARK, True)
    torch.compiler.load_compiled_function = load_compiled_function


def _nothing_left(config: Any) -> None:
    """What plain Inductor loads is complete."""
