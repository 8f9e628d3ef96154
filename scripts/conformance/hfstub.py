"""A Hugging Face cache with just enough in it for vLLM's scheduler tests to run offline.

The tests never load weights; they need the shapes in a config.json, a tokenizer with the special
tokens of the multimodal models, and an image preprocessor to size the encoder budget.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REVISION = "0" * 40
BASE_TOKENS = ("<unk>", "<s>", "</s>", "<pad>")

OPT: dict[str, Any] = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "vocab_size": 50272,
    "hidden_size": 768,
    "word_embed_proj_dim": 768,
    "ffn_dim": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 2048,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "torch_dtype": "float16",
}

LLAVA: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "image_token_index": 32000,
    "image_seq_length": 576,
    "pad_token_id": 32001,
    "torch_dtype": "float16",
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "text_config": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 32064,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
    },
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": 336,
        "patch_size": 14,
        "projection_dim": 768,
        "vocab_size": 32000,
    },
}

QWEN_VL: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128000,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "vision_token_id": 151654,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "spatial_patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
    },
}

CLIP_PREPROCESSOR: dict[str, Any] = {
    "image_processor_type": "CLIPImageProcessor",
    "processor_class": "LlavaProcessor",
    "size": {"shortest_edge": 336},
    "crop_size": {"height": 336, "width": 336},
}

LLAVA_PROCESSOR: dict[str, Any] = {
    "processor_class": "LlavaProcessor",
    "image_token": "<image>",
    "patch_size": 14,
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
}

QWEN_PREPROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_pixels": 3136,
    "max_pixels": 12845056,
}


def make_cache(home: Path) -> None:
    """Write the three models below `home`, in the layout that HF_HOME names."""
    opt = _snapshot(home, "facebook/opt-125m")
    _write(opt / "config.json", OPT)
    _tokenizer(opt, 50272, {})

    llava = _snapshot(home, "llava-hf/llava-1.5-7b-hf")
    _write(llava / "config.json", LLAVA)
    _write(llava / "preprocessor_config.json", CLIP_PREPROCESSOR)
    _write(llava / "processor_config.json", LLAVA_PROCESSOR)
    _tokenizer(llava, 32064, {"<image>": 32000}, image_token="<image>")

    qwen = _snapshot(home, "Qwen/Qwen2.5-VL-3B-Instruct")
    _write(qwen / "config.json", QWEN_VL)
    _write(qwen / "preprocessor_config.json", QWEN_PREPROCESSOR)
    vision = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>")
    tokens = {token: 151652 + i for i, token in enumerate((*vision, "<|video_pad|>"))}
    _tokenizer(qwen, 151936, tokens)


def _snapshot(home: Path, repo: str) -> Path:
    base = home / "hub" / f"models--{repo.replace('/', '--')}"
    snapshot = base / "snapshots" / REVISION
    snapshot.mkdir(parents=True, exist_ok=True)
    (base / "refs").mkdir(exist_ok=True)
    (base / "refs" / "main").write_text(REVISION)
    return snapshot


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content))


def _tokenizer(snapshot: Path, size: int, special: Mapping[str, int], **config: str) -> None:
    """One word per id: the tests look at token counts and at the special ids only."""
    names = [*BASE_TOKENS, *(f"t{i}" for i in range(len(BASE_TOKENS), size))]
    for token, index in special.items():
        names[index] = token
    added = {token: names.index(token) for token in (*BASE_TOKENS, *special)}
    details = [
        {
            "id": index,
            "content": token,
            "special": True,
            "normalized": False,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
        }
        for token, index in added.items()
    ]
    _write(
        snapshot / "tokenizer.json",
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": details,
            "normalizer": None,
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "post_processor": None,
            "decoder": None,
            "model": {
                "type": "WordLevel",
                "vocab": {token: index for index, token in enumerate(names)},
                "unk_token": "<unk>",
            },
        },
    )
    _write(
        snapshot / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": "<unk>",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "pad_token": "<pad>",
            "additional_special_tokens": list(special),
            **config,
        },
    )
