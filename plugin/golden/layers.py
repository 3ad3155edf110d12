"""Hidden states behind each layer, of vLLM as it is installed here and of the model's own code in float32 on the CPU.

Both run the same prompt once, without compiled code or graphs, which would pass hooks by.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from relight.core.errors import LocalFault

States = dict[str, torch.Tensor]
"""By place: embed, layer 0 and so on, norm, logits; each (tokens, width) in float32."""
UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


def _inner(model: Any) -> Any:
    """The part with `layers`, `embed_tokens` and `norm`, as decoders of this family call them."""
    inner = getattr(model, "model", model)
    for name in ("layers", "embed_tokens", "norm"):
        if not hasattr(inner, name):
            raise LocalFault(f"{type(model).__name__} has no {name}: its layers cannot be told apart here")
    return inner


def _plain(value: torch.Tensor) -> torch.Tensor:
    flat = value.detach().reshape(-1, value.shape[-1])
    return flat.to("cpu", torch.float32)


def reference(path: str, prompt: Sequence[int]) -> States:
    """Of transformers' own code for the model, in float32 on the CPU."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    inner, found = _inner(model), States()

    def keep(place: str) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            found[place] = _plain(output[0] if isinstance(output, tuple) else output)

        return hook

    inner.embed_tokens.register_forward_hook(keep("embed"))
    for n, layer in enumerate(inner.layers):
        layer.register_forward_hook(keep(f"layer {n}"))
    inner.norm.register_forward_hook(keep("norm"))
    with torch.inference_mode():
        found["logits"] = _plain(model(torch.tensor([list(prompt)])).logits[:, -1])
    return found


def engine(path: str, prompt: Sequence[int], dtype: str) -> States:
    """Of vLLM, in this process."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    from vllm import LLM, SamplingParams

    found, tokens = States(), len(prompt)

    def keep(place: str) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            # A decoder's layer hands on what it adds beside what it adds it to; the next one's norm adds them up.
            parts = [p for p in (output if isinstance(output, tuple) else (output,)) if p is not None]
            whole = parts[0] if place == "norm" else torch.stack([p.float() for p in parts]).sum(0)
            if place not in found and whole.shape[0] >= tokens:
                found[place] = _plain(whole[:tokens])

        return hook

    def hooked(model: Any) -> None:
        inner = _inner(model)
        inner.embed_tokens.register_forward_hook(keep("embed"))
        for n, layer in enumerate(inner.layers):
            layer.register_forward_hook(keep(f"layer {n}"))
        inner.norm.register_forward_hook(keep("norm"))

    made = LLM(
        path, dtype=dtype, enforce_eager=True, max_model_len=max(64, tokens + 8), max_num_seqs=1,
        kv_cache_memory_bytes=64 << 20, distributed_executor_backend=UNIPROC, enable_prefix_caching=False,
    )  # fmt: skip
    # Not sooner: what it runs to measure itself would be taken for the prompt.
    made.apply_model(hooked)
    made.generate([{"prompt_token_ids": list(prompt)}], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)

    def last(model: Any) -> None:
        states = found["norm"][-1:].to(next(model.parameters()).dtype)
        found["logits"] = _plain(model.compute_logits(states.to(next(model.parameters()).device)))

    made.apply_model(last)
    return found


def errors(ours: States, theirs: States) -> list[tuple[str, float]]:
    """Relative errors in the order in which a token passes the places. Raises LocalFault for places that differ."""
    if odd := sorted(set(ours) ^ set(theirs)):
        raise LocalFault(f"{', '.join(odd)}: in one of both alone")
    places = ["embed", *sorted((p for p in theirs if p[:5] == "layer"), key=lambda p: int(p[6:])), "norm", "logits"]
    found = []
    for place in places:
        a, b = ours[place], theirs[place]
        width = min(a.shape[-1], b.shape[-1])
        # A vocabulary may be padded on one side.
        a, b = a[..., :width], b[..., :width]
        found.append((place, float((a - b).norm() / b.norm())))
    return found
