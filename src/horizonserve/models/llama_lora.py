"""A Llama and one LoRA adapter for each of four services, for ``vllm serve --enable-lora``.

The adapters lie in ``adapters/SERVICE`` of the model directory, named like the services of
configs/services/hospital.yaml.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from horizonserve.models.tokenizer import build_tokenizer, silence_unspeakable

VOCABULARY = 152064
ADAPTERS = "adapters"
SERVICES: Final = (
    "intelligent-triage",
    "pre-assessment",
    "analysis-assistant",
    "record-generation",
)
RANK: Final = 8
# Else the logits are so near to each other that rounding decides between tokens.
SPREAD: Final = 0.3


@dataclass(frozen=True)
class Shape:
    """One size of the model. CPU attention takes head sizes 32, 64, 128, ... but not 16."""

    dtype: torch.dtype
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int


SHAPES: dict[str, Shape] = {
    "tiny": Shape(torch.float32, 64, 128, 2, 2, 1, 32),
    # Steps that cost what a GPU's cost, as the other family of this size: see docs/models.md.
    "small": Shape(torch.bfloat16, 512, 1408, 6, 8, 4, 64),
}


def build(size: str, out: Path, seed: int) -> None:
    """Write the model of ``size`` and its adapters into the existing directory ``out``."""
    shape = SHAPES[size]
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(out)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = LlamaConfig(
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            vocab_size=VOCABULARY,
            max_position_embeddings=8192,
            initializer_range=SPREAD if size == "tiny" else 0.02,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        model = LlamaForCausalLM(config).to(shape.dtype)
        with torch.no_grad():
            silence_unspeakable(model.lm_head.weight)
        model.save_pretrained(out)
        for service in SERVICES:
            write_adapter(config, shape.dtype, out / ADAPTERS / service)


def write_adapter(config: LlamaConfig, dtype: torch.dtype, folder: Path) -> None:
    """Write one random adapter of the attention layers of such a model, in PEFT's layout."""
    folder.mkdir(parents=True)
    attention = config.num_attention_heads * config.head_dim
    widths = {
        "q_proj": attention,
        "v_proj": config.num_key_value_heads * config.head_dim,
        "o_proj": config.hidden_size,
    }
    inputs = {"o_proj": attention}
    weights = {}
    for layer in range(config.num_hidden_layers):
        for name, width in widths.items():
            key = f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_"
            weights[f"{key}A.weight"] = SPREAD * torch.randn(
                RANK, inputs.get(name, config.hidden_size)
            )
            weights[f"{key}B.weight"] = SPREAD * torch.randn(width, RANK)
    save_file(
        {key: weight.to(dtype).contiguous() for key, weight in weights.items()},
        folder / "adapter_model.safetensors",
    )
    peft = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": list(widths),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(peft) + "\n", "utf-8")
