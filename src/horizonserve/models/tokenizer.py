"""A tokenizer with the layout of Qwen's, made from nothing.

Each known word with a space before it is one token (see ``words``); any other text is encoded
byte by byte. Ids that only a model can produce decode to visible filler words, so that a client
sees text for every generated token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from horizonserve.models.words import WORDS

# Ids below this are bytes, words and fillers; the special tokens follow in Qwen's own order.
FIRST_SPECIAL_ID = 151643
FIRST_WORD_ID = 256
SPECIAL_TOKENS: tuple[str, ...] = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|AUDIO|>",
    "<|audio_bos|>",
    "<|audio_eos|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_bos|>",
    "<|vision_eos|>",
    "<|vision_pad|>",
    "<|IMAGE|>",
    "<|VIDEO|>",
)


@dataclass(frozen=True)
class Layout:
    """What differs between families: the tokens behind the words, and how media is written."""

    special_tokens: tuple[str, ...]  # ids from FIRST_SPECIAL_ID on
    placeholders: dict[str, str]  # attribute under which a processor looks a token up -> token
    media: dict[str, str]  # kind of content in a chat message -> its text in the prompt


QWEN_OMNI = Layout(
    special_tokens=SPECIAL_TOKENS,
    placeholders={
        "audio_token": "<|AUDIO|>",
        "image_token": "<|IMAGE|>",
        "video_token": "<|VIDEO|>",
        "audio_bos_token": "<|audio_bos|>",
        "audio_eos_token": "<|audio_eos|>",
        "vision_bos_token": "<|vision_bos|>",
        "vision_eos_token": "<|vision_eos|>",
    },
    media={
        "audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
        "image": "<|vision_bos|><|IMAGE|><|vision_eos|>",
        "video": "<|vision_bos|><|VIDEO|><|vision_eos|>",
    },
)


def build_tokenizer(layout: Layout = QWEN_OMNI) -> PreTrainedTokenizerFast:
    """Return the tokenizer, with the chat template and the modality placeholders set."""
    vocabulary, merges = _vocabulary()
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in layout.special_tokens])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(layout.special_tokens[3:]),
        **layout.placeholders,
    )
    fast.chat_template = _chat_template(layout.media)
    for name, token in layout.placeholders.items():
        setattr(fast, name, token)
    return fast


def silence_unspeakable(output_rows: Any) -> None:
    """Keep a random model from producing ids that stand for no word.

    A zero output row has logit zero, below the best of many random ones, so neither greedy nor
    top-k sampling picks it. Then text always has characters, and lengths are set by the request
    instead of by a chance end token. ``output_rows`` is (vocabulary, hidden); outside of autograd.
    """
    output_rows[:FIRST_WORD_ID] = 0
    output_rows[FIRST_SPECIAL_ID:] = 0


def _chat_template(media: dict[str, str]) -> str:
    parts = {**media, "text": "{{ c['text'] }}"}
    branches = "{% elif ".join(f"c['type'] == '{kind}' %}}{text}" for kind, text in parts.items())
    return (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
        "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
        f"{{% if {branches}{{% endif %}}{{% endfor %}}{{% endif %}}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def _vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Bytes, then words (with the merges that build them), then fillers up to the specials."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges: list[tuple[str, str]] = []
    known = set(pieces)
    # A word is built from its space rightwards, and only word starts carry a space, so merges of
    # one word never apply inside another.
    for word in WORDS:
        piece = "\u0120"
        for letter in word:
            longer = piece + letter
            if longer not in known:
                merges.append((piece, letter))
                known.add(longer)
                pieces.append(longer)
            piece = longer
    pieces += [f"\u0120w{i}" for i in range(len(pieces), FIRST_SPECIAL_ID)]
    return {piece: i for i, piece in enumerate(pieces)}, merges
