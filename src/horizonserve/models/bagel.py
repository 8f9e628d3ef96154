"""Build a complete random-weight BAGEL model, small enough to run without a GPU.

The language model has BAGEL's two sets of layers, one for text and one (``moe_gen``) for image
latents. Everything shrinks but the vocabulary and the image autoencoder: vLLM-Omni builds that one
with fixed sizes, so it is there in full, 84 million parameters.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import (
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Model,
    SiglipImageProcessor,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from horizonserve.models.tokenizer import QWEN_OMNI, build_tokenizer, silence_unspeakable

# Ids of the tokenizer, rounded up as in Qwen's models.
VOCABULARY = 152064
# Special tokens of BAGEL that the shared tokenizer has not: around an image, an image that is
# looked at, and one that is edited.
IMAGE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|fim_middle|>")
LAYOUT = replace(
    QWEN_OMNI,
    special_tokens=QWEN_OMNI.special_tokens + IMAGE_TOKENS,
    media=QWEN_OMNI.media | {"image": "<|image_pad|>"},
)
# The image stage computes in bfloat16 whatever the deploy file says.
DTYPE = torch.bfloat16
VIT_PATCH = 14  # pixels
VIT_SIDE = 4  # patches
VAE = {"z_channels": 16, "downsample": 8}
LATENT_PATCH = 2  # latents; with the downsampling above, one token is 16 x 16 pixels


@dataclass(frozen=True)
class Shape:
    """One size of the whole model. CPU attention takes head sizes 32, 64, 128, ... but not 16."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    # Tokens along the edge of the largest image, 16 pixels each. The image stage draws one of 512
    # pixels when it starts.
    latent_side: int
    vit_hidden: int


SHAPES: dict[str, Shape] = {
    "tiny": Shape(64, 128, 2, 2, 1, latent_side=32, vit_hidden=64),
}


def build(size: str, out: Path, seed: int) -> None:
    """Write the model of ``size`` into the existing directory ``out``."""
    if size not in SHAPES:
        raise ValueError(f"size: {size!r} is not one that bagel has: {', '.join(SHAPES)}")
    # Imported here: it brings vLLM-Omni's image stage with it.
    from vllm_omni.diffusion.models.bagel.autoencoder import AutoEncoder
    from vllm_omni.diffusion.models.bagel.pipeline_bagel import default_ae_params

    config = _config(SHAPES[size])
    _write_config(config, out)
    _write_processor(out)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        save_file(_model_weights(config), out / "ema.safetensors")
        save_file(_stored(AutoEncoder(default_ae_params())), out / "ae.safetensors")


def _config(shape: Shape) -> dict[str, Any]:
    text = asdict(shape)
    latent_side, vit_hidden = text.pop("latent_side"), text.pop("vit_hidden")
    return {
        "architectures": ["BagelForConditionalGeneration"],
        "model_type": "bagel",
        "dtype": str(DTYPE).removeprefix("torch."),
        "llm_config": {
            **text,
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 32768,
            "max_window_layers": shape.num_hidden_layers,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000.0,
            "qk_norm": True,
            "tie_word_embeddings": False,
        },
        "vit_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": vit_hidden,
            "intermediate_size": 2 * vit_hidden,
            "image_size": VIT_SIDE * VIT_PATCH,
            "patch_size": VIT_PATCH,
            "num_attention_heads": vit_hidden // 32,
            "num_hidden_layers": 1,
            "num_channels": 3,
            "vision_use_head": False,
        },
        "vae_config": VAE,
        "latent_patch_size": LATENT_PATCH,
        "max_latent_size": latent_side,
        "vit_max_num_patch_per_side": VIT_SIDE,
        "connector_act": "gelu_pytorch_tanh",
        "visual_gen": True,
        "visual_und": True,
    }


def _write_config(config: dict[str, Any], out: Path) -> None:
    # The text stage reads the whole file; the image stage reads its parts, each from its own.
    for name, part in (
        ("config.json", config),
        ("llm_config.json", config["llm_config"]),
        ("vit_config.json", config["vit_config"]),
    ):
        (out / name).write_text(json.dumps(part, indent=1) + "\n", "utf-8")


def _write_processor(out: Path) -> None:
    tokenizer = build_tokenizer(LAYOUT)
    tokenizer.save_pretrained(out)
    side = VIT_SIDE * VIT_PATCH
    SiglipImageProcessor(size={"height": side, "width": side}).save_pretrained(out)
    generation = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    (out / "generation_config.json").write_text(json.dumps(generation) + "\n", "utf-8")


def _model_weights(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    from vllm_omni.diffusion.models.bagel.bagel_transformer import (
        PositionEmbedding,
        TimestepEmbedder,
    )

    text = Qwen2Config(**config["llm_config"])
    vit = SiglipVisionConfig(**config["vit_config"])
    hidden = text.hidden_size
    latent = LATENT_PATCH**2 * VAE["z_channels"]
    language = Qwen2ForCausalLM(text)
    with torch.no_grad():
        silence_unspeakable(language.lm_head.weight)
    parts = nn.ModuleDict(
        {
            "language_model": language,
            "vit_model": nn.ModuleDict({"vision_model": SiglipVisionModel(vit)}),
            "vit_pos_embed": PositionEmbedding(VIT_SIDE, hidden),
            "connector": nn.ModuleDict(
                {"fc1": nn.Linear(vit.hidden_size, hidden), "fc2": nn.Linear(hidden, hidden)}
            ),
            "time_embedder": TimestepEmbedder(hidden),
            "vae2llm": nn.Linear(latent, hidden),
            "llm2vae": nn.Linear(hidden, latent),
            "latent_pos_embed": PositionEmbedding(config["max_latent_size"], hidden),
        }
    )
    weights = _stored(parts)
    prefix = "language_model.model."
    for name, value in _stored(Qwen2Model(text)).items():
        if not name.startswith("embed_tokens."):
            weights[prefix + _image_side(name)] = value
    head_dim = hidden // text.num_attention_heads
    for layer in range(text.num_hidden_layers):
        for norm in ("q_norm", "k_norm", "q_norm_moe_gen", "k_norm_moe_gen"):
            name = f"{prefix}layers.{layer}.self_attn.{norm}.weight"
            weights[name] = torch.ones(head_dim, dtype=DTYPE)
    return weights


def _image_side(name: str) -> str:
    """Return the name of a text layer's twin: ``q_proj`` and ``mlp`` get ``_moe_gen`` behind."""
    if ".mlp." in name:
        return name.replace(".mlp.", ".mlp_moe_gen.")
    return re.sub(r"\.(weight|bias)$", r"_moe_gen.\1", name)


def _stored(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.to(DTYPE).contiguous() for name, value in module.state_dict().items()}
