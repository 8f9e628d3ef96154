"""Qwen2.5-Omni: thinker (text), talker (speech tokens) and code2wav (waveform)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Qwen2_5OmniConfig,
    Qwen2_5OmniForConditionalGeneration,
    Qwen2_5OmniProcessor,
    WhisperFeatureExtractor,
)
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

from horizonserve.models.tokenizer import build_tokenizer, silence_unspeakable

# The engine reads voice tokens 151870 and 151872 from the thinker's embedding, so the vocabulary
# keeps its full width at every size.
VOCABULARY = 152064
# Codec ids the vocoder knows; the talker's control ids lie above.
CODEC_IDS = 8192
VOICES = ("Chelsie", "Ethan")
REFERENCE_MEL_FRAMES = 64


@dataclass(frozen=True)
class Transformer:
    """Shape of one decoder. CPU attention takes head sizes 32, 64, 128, ... but not 16."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mrope: tuple[int, int, int]  # rotary pairs for time, height, width; sums to head_dim / 2

    def as_config(self) -> dict[str, Any]:
        """Return the fields in the configuration's own names."""
        rope = {"rope_type": "default", "mrope_section": list(self.mrope)}
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "max_window_layers": self.layers,
            "layer_types": ["full_attention"] * self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rope_scaling": {**rope, "type": "mrope"},
            "rope_parameters": {**rope, "rope_theta": 1_000_000.0},
        }


@dataclass(frozen=True)
class Shape:
    """One size of the whole model."""

    dtype: torch.dtype
    thinker: Transformer
    talker: Transformer
    encoder_hidden: int  # audio and vision encoders
    encoder_layers: int
    dit_hidden: int
    dit_layers: int
    vocoder_channels: int


SHAPES: dict[str, Shape] = {
    "tiny": Shape(
        dtype=torch.float32,
        thinker=Transformer(64, 128, 2, 2, 1, 32, (4, 6, 6)),
        talker=Transformer(64, 128, 2, 2, 1, 32, (4, 6, 6)),
        encoder_hidden=64,
        encoder_layers=1,
        dit_hidden=64,
        dit_layers=2,
        vocoder_channels=64,
    ),
    # The wide output layer makes a decode step a walk over weights; the layers below it are what
    # a prompt's tokens pay for. See docs/models.md for the measured curves.
    "small": Shape(
        dtype=torch.bfloat16,
        thinker=Transformer(512, 1408, 6, 8, 4, 64, (8, 12, 12)),
        talker=Transformer(256, 512, 2, 8, 2, 32, (4, 6, 6)),
        encoder_hidden=256,
        encoder_layers=2,
        dit_hidden=64,
        dit_layers=2,
        vocoder_channels=64,
    ),
}


def build(size: str, out: Path, seed: int) -> None:
    """Write the model of ``size`` into the existing directory ``out``."""
    shape = SHAPES[size]
    config = _config(shape)
    _write_processor(out)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2_5OmniForConditionalGeneration(Qwen2_5OmniConfig(**config)).to(shape.dtype)
        _silence(model)
        model.save_pretrained(out)
        torch.save(_voices(config["token2wav_config"]["dit_config"]), out / "spk_dict.pt")
    # save_pretrained writes its own reading of the configuration; the engine needs ours.
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n", "utf-8")


def _config(shape: Shape) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(Qwen2_5OmniConfig().to_json_string(use_diff=False))
    thinker, talker = config["thinker_config"], config["talker_config"]
    hidden = shape.thinker.hidden
    heads = shape.encoder_hidden // 32
    thinker["text_config"].update(shape.thinker.as_config(), vocab_size=VOCABULARY)
    thinker["text_config"]["tie_word_embeddings"] = False
    thinker.update(
        vision_start_token_id=151652,
        vision_end_token_id=151653,
        audio_token_id=thinker["audio_token_index"],
        image_token_id=thinker["image_token_index"],
        video_token_id=thinker["video_token_index"],
    )
    thinker["audio_config"].update(
        d_model=shape.encoder_hidden,
        encoder_layers=shape.encoder_layers,
        encoder_attention_heads=heads,
        encoder_ffn_dim=2 * shape.encoder_hidden,
        output_dim=hidden,
    )
    thinker["vision_config"].update(
        depth=shape.encoder_layers,
        hidden_size=shape.encoder_hidden,
        intermediate_size=2 * shape.encoder_hidden,
        num_heads=heads,
        out_hidden_size=hidden,
        fullatt_block_indexes=[shape.encoder_layers - 1],
    )
    talker.update(shape.talker.as_config(), embedding_size=hidden)
    code2wav = config["token2wav_config"]
    code2wav["dit_config"].update(
        hidden_size=shape.dit_hidden,
        num_hidden_layers=shape.dit_layers,
        num_attention_heads=shape.dit_hidden // 64,
        emb_dim=shape.dit_hidden,
        look_ahead_layers=[0],
        look_backward_layers=[shape.dit_layers - 1],
        enc_channels=[64, 64, 64, 64, 192],
    )
    code2wav["bigvgan_config"].update(upsample_initial_channel=shape.vocoder_channels)
    config["architectures"] = ["Qwen2_5OmniModel"]
    for part in (config, thinker, thinker["text_config"], talker):
        part["dtype"] = str(shape.dtype).removeprefix("torch.")
    return config


def _silence(model: Any) -> None:
    """Keep the model from producing ids that stand for no word or no sound."""
    with torch.no_grad():
        silence_unspeakable(model.thinker.lm_head.weight)
        model.talker.codec_head.weight[CODEC_IDS:] = 0


def _write_processor(out: Path) -> None:
    tokenizer = build_tokenizer()
    processor = Qwen2_5OmniProcessor(
        image_processor=Qwen2VLImageProcessor(),
        video_processor=Qwen2VLVideoProcessor(),
        feature_extractor=WhisperFeatureExtractor(feature_size=128),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    )
    processor.save_pretrained(out)
    tokenizer.save_pretrained(out)
    generation = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    (out / "generation_config.json").write_text(json.dumps(generation) + "\n", "utf-8")


def _voices(dit: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        voice: {
            "cond": torch.randn(1, dit["enc_emb_dim"]),
            "ref_mel": torch.randn(1, REFERENCE_MEL_FRAMES, dit["mel_dim"]),
            "bos_token": 151872,
        }
        for voice in VOICES
    }
