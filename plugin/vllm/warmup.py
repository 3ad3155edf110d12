"""The warm-up of a lazy start on the CPU, which has no graphs: a handful of tokens first, the rest while it serves.

The one small forward pass loads the compiled code; vLLM's own warm-up, over as many tokens as a step may have, is left
for the first quiet moment.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_model_runner import _set_global_compilation_settings

from relight.plugin.vllm.completing import Piece

LEAST_TOKENS = 8
"""Not one: a compiler that traces with a single token makes code for a single token."""


def least(runner: Any) -> tuple[Piece, ...]:
    """Makes the runner's next warm-up the smallest there is; returns what is then left to do, piece by piece."""
    whole = runner.warming_up_model

    def smallest() -> None:
        del runner.warming_up_model
        with _set_global_compilation_settings(runner.vllm_config):
            runner._dummy_run(LEAST_TOKENS)

    runner.warming_up_model = smallest
    return (whole,)
