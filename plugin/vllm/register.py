"""Entry point of group `vllm.general_plugins`: runs in every process of the engine; light and repeatable."""

from __future__ import annotations


def register() -> None:
    """Makes the load format `relight` known (importing the module registers it once); lets compiled code be loaded."""
    from relight.plugin.vllm import aot, loader  # noqa: F401 - the import is the effect

    aot.cure()
