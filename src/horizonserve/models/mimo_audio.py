"""MiMo-Audio: one stage for text and speech codes, and code2wav, whose weights are the codec's.

The codec (``audio_tokenizer`` in the model directory) also turns the user's audio into codes, in
the API server. Every process finds it through ``MIMO_AUDIO_TOKENIZER_PATH``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import Qwen2Model
from vllm_omni.model_executor.models.mimo_audio.config_mimo_audio import (
    MiMoAudioConfig,
    MiMoAudioTokenizerConfig,
)
from vllm_omni.model_executor.models.mimo_audio.modeling_audio_tokenizer import MiMoAudioTokenizer

from horizonserve.models.tokenizer import (
    FIRST_SPECIAL_ID,
    FIRST_WORD_ID,
    Layout,
    build_tokenizer,
    silence_unspeakable,
)

VOCABULARY = 151680
# The engine compares ids, so these tokens must stand at the ids they have in the released model.
SPECIAL_TOKENS: tuple[str, ...] = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    *(f"<|unused_{i}|>" for i in range(FIRST_SPECIAL_ID + 3, 151665)),
    "<|sosp|>",
    "<|eosp|>",
    "<|empty|>",
    "<|Human|>",
    "<|SpeechLM|>",
    "<|sostm|>",
    "<|eostm|>",
    "<|eot|>",
)
EMPTY_ID = FIRST_SPECIAL_ID + SPECIAL_TOKENS.index("<|empty|>")
LAYOUT = Layout(
    special_tokens=SPECIAL_TOKENS,
    placeholders={},
    media={"audio": "<|sosp|><|empty|><|eosp|>"},
)
AUDIO_TOKENIZER = "audio_tokenizer"
# Speech codes a channel knows, and one more id that stands for silence.
CODES = (1024, 1024, 128, 128, 128, 128, 128, 128)
# The engine's rotary sections (16, 24, 24) fix half of a head.
HEAD_DIM = 128


@dataclass(frozen=True)
class Shape:
    """One size of the whole model; ``hidden`` is a multiple of HEAD_DIM."""

    hidden: int
    intermediate: int
    layers: int  # of the text model, and of each of the two transformers inside a group of codes
    local_hidden: int
    local_heads: int
    codec_hidden: int
    codec_layers: int


SHAPES: dict[str, Shape] = {
    "tiny": Shape(
        hidden=128,
        intermediate=256,
        layers=2,
        local_hidden=64,
        local_heads=2,
        codec_hidden=64,
        codec_layers=1,
    ),
}


def build(size: str, out: Path, seed: int) -> None:
    """Write the model of ``size`` and its codec into the existing directory ``out``."""
    if size not in SHAPES:
        raise ValueError(f"size: mimo-audio has {', '.join(SHAPES)}, not {size!r}")
    shape = SHAPES[size]
    config = _config(shape)
    build_tokenizer(LAYOUT).save_pretrained(out)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _Model(config)
        _alternate_words_and_sound(model)
        weights = {name: value.contiguous() for name, value in model.state_dict().items()}
        save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
        _codec(shape).save_pretrained(out / AUDIO_TOKENIZER)
    _write_json(out / "config.json", json.loads(config.to_json_string(use_diff=False)))
    _write_json(out / "generation_config.json", {"eos_token_id": 151645, "pad_token_id": 151643})


def _config(shape: Shape) -> MiMoAudioConfig:
    return MiMoAudioConfig(
        architectures=["MiMoAudioModel"],
        # The engine allocates bfloat16 buffers whatever is configured.
        dtype="bfloat16",
        vocab_size=VOCABULARY,
        tie_word_embeddings=False,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.hidden // HEAD_DIM,
        num_key_value_heads=1,
        head_dim=HEAD_DIM,
        max_position_embeddings=8192,
        local_dim=shape.local_hidden,
        local_layers=shape.layers,
        local_attn_heads=shape.local_heads,
        local_ffn_dim=2 * shape.local_hidden,
        input_local_layers=shape.layers,
        speech_vocab_size="-".join(str(n + 1) for n in CODES),
        speech_zeroemb_idx="-".join(str(n) for n in CODES),
        bos_token_id=151643,
        eos_token_id=151645,
    )


class _Model(nn.Module):
    """The weights of stage 0 under the names that the engine loads."""

    def __init__(self, config: MiMoAudioConfig) -> None:
        super().__init__()
        local, hidden = config.local_dim, config.hidden_size
        vocabularies = config.parsed_speech_vocab_sizes()
        self.model = Qwen2Model(config)
        self.lm_head = nn.Linear(hidden, config.vocab_size, bias=False)
        nn.init.normal_(self.lm_head.weight, std=config.initializer_range)
        self.local_transformer = Qwen2Model(config.local_config())
        self.input_local_transformer = Qwen2Model(config.input_local_config())
        # Their inputs are sums of speech embeddings.
        self.local_transformer.embed_tokens = self.input_local_transformer.embed_tokens = None
        self.local_transformer_lm_heads = nn.ModuleList(
            nn.Linear(local, n, bias=False) for n in vocabularies
        )
        self.speech_embeddings = nn.ModuleList(nn.Embedding(n, local) for n in vocabularies)
        self.speech_group_downcast = nn.Linear(local * config.group_size, hidden, bias=False)
        self.hidden_states_downcast = nn.Linear(hidden, local, bias=False)
        self.to(torch.bfloat16)


def _alternate_words_and_sound(model: Any) -> None:
    """Let a word follow sound and sound follow a word, and let nothing else be produced.

    Coordinate 0 of the residual stream is given to one fact, "the last token was a word": only
    word embeddings set it, no layer writes it, and the output row of ``<|empty|>``, which stands
    for a group of speech codes, reads nothing else. The other output rows are zero, below the
    best of the many random ones of the words, so lengths are set by the request.
    """
    words = slice(FIRST_WORD_ID, FIRST_SPECIAL_ID)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 0
        model.model.embed_tokens.weight[words, 0] = 1
        model.speech_group_downcast.weight[0] = 0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0
            layer.mlp.down_proj.weight[0] = 0
        silence_unspeakable(model.lm_head.weight)
        model.lm_head.weight[EMPTY_ID, 0] = 1


def _codec(shape: Shape) -> MiMoAudioTokenizer:
    heads = shape.codec_hidden // 32
    config = MiMoAudioTokenizerConfig(
        # Of the released codec: 24 kHz, 100 frames of mel spectrum a second, 25 codes a second.
        avg_pooler=2,
        num_quantizers=len(CODES),
        codebook_size=list(CODES),
        nfft=960,
        window_size=960,
        max_audio_seconds=60,
        d_model=shape.codec_hidden,
        encoder_layers=shape.codec_layers,
        encoder_attention_heads=heads,
        encoder_ffn_dim=2 * shape.codec_hidden,
        encoder_causal=True,
        decoder_layers=shape.codec_layers,
        decoder_attention_heads=heads,
        decoder_ffn_dim=2 * shape.codec_hidden,
        vocoder_dim=shape.codec_hidden,
        vocoder_num_layers=shape.codec_layers,
        vocoder_attention_heads=heads,
        vocoder_intermediate_dim=2 * shape.codec_hidden,
    )
    codec = MiMoAudioTokenizer(config)
    for module in codec.modules():
        # Codebooks start at zero, waiting for k-means; then every sound would be code 0.
        if hasattr(module, "cluster_size"):
            module.embed.normal_()
            module.inited.fill_(1)
    return codec


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
