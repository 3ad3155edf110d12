"""Which engines may be forked from a zygote: those whose environment an import would have read alike. No I/O."""

from __future__ import annotations

from collections.abc import Mapping

_READ_AT_IMPORT = (
    "LD_", "PYTHON", "OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "MALLOC_", "GLIBC_", "HF_", "HUGGINGFACE_",
    "TRANSFORMERS_", "TOKENIZERS_", "TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "TRITON_", "RAYON_", "NUMEXPR_", "LANG",
    "LC_", "TZ", "PATH", "VLLM_LOGGING_", "VLLM_CONFIGURE_LOGGING", "VLLM_TARGET_DEVICE", "VLLM_PLUGINS",
    "VLLM_USE_MODELSCOPE",
)  # fmt: skip
"""Variables, by how they begin, that libraries read once: a child's own value would come too late."""
_SET_IN_THE_CHILD = frozenset({
    "OMP_NUM_THREADS", "PYTHONUNBUFFERED", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_HOME",
})  # fmt: skip
_OF_A_SINGLE_THREAD = frozenset({
    "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM",
    "TORCHINDUCTOR_COMPILE_THREADS", "TORCHINDUCTOR_CPP_DYNAMIC_THREADS",
})  # fmt: skip
"""The zygote has them so that no import starts a thread, or because the engine sets them for its own children."""


def unfit(zygote: Mapping[str, str], engine: Mapping[str, str]) -> str:
    """Why an engine with this environment cannot be forked from a zygote with that one; empty when it can."""
    for name in sorted({*zygote, *engine}):
        if not name.startswith(_READ_AT_IMPORT) or name in _SET_IN_THE_CHILD:
            continue
        if name in _OF_A_SINGLE_THREAD and name not in engine:
            continue
        if zygote.get(name) != engine.get(name):
            return f"{name} is read when libraries are loaded, and is {engine.get(name)!r} for this model"
    return ""
