"""Makes a tiny Qwen3 model with seeded random weights and a byte-level tokenizer, for tests of real engines.

    python scripts/make_tiny_model.py DIRECTORY        (in the engine environment)

Scaled random weights give varied, repeatable greedy tokens: two engines agree only when their bytes do.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD, VOCABULARY = 2, 128, 256, 4, 2, 32, 512


def _tokenizer(directory: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"special_tokens": ["<|end|>"], "initial_alphabet": alphabet, "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=400, **options)
    tokenizer.train_from_iterator(["the replica wakes and answers", "a guardian sleeps beside it"] * 40, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": template})
    )


def _config(directory: Path) -> None:
    (directory / "config.json").write_text(
        json.dumps({
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "hidden_act": "silu",
            "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
            "tie_word_embeddings": False, "attention_bias": False, "torch_dtype": "bfloat16", "eos_token_id": 0,
        }, indent=2)
    )  # fmt: skip


def main(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    _tokenizer(directory)
    _config(directory)
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(torch.bfloat16)

    ones = torch.ones(HIDDEN, dtype=torch.bfloat16)
    weights = {
        "model.embed_tokens.weight": random(VOCABULARY, HIDDEN) * 10,
        "model.norm.weight": ones,
        "lm_head.weight": random(VOCABULARY, HIDDEN),
    }
    for n in range(LAYERS):
        at = f"model.layers.{n}."
        weights |= {
            f"{at}self_attn.q_proj.weight": random(HEADS * HEAD, HIDDEN),
            f"{at}self_attn.k_proj.weight": random(KV_HEADS * HEAD, HIDDEN),
            f"{at}self_attn.v_proj.weight": random(KV_HEADS * HEAD, HIDDEN),
            f"{at}self_attn.o_proj.weight": random(HIDDEN, HEADS * HEAD),
            f"{at}self_attn.q_norm.weight": ones[:HEAD].clone(),
            f"{at}self_attn.k_norm.weight": ones[:HEAD].clone(),
            f"{at}mlp.gate_proj.weight": random(INNER, HIDDEN),
            f"{at}mlp.up_proj.weight": random(INNER, HIDDEN),
            f"{at}mlp.down_proj.weight": random(HIDDEN, INNER),
            f"{at}input_layernorm.weight": ones.clone(),
            f"{at}post_attention_layernorm.weight": ones.clone(),
        }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
