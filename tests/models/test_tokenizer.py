"""The tokenizer: exact prompt lengths, Qwen's special ids, visible text for every word id."""

from __future__ import annotations

from typing import Any

import pytest

from horizonserve.models.words import WORDS, prompt_text

tokenizer_module = pytest.importorskip("horizonserve.models.tokenizer", exc_type=ImportError)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tokenizer_module.build_tokenizer()


@pytest.mark.parametrize("tokens", [1, 20, 1000])
def test_prompt_has_the_asked_number_of_tokens(tokenizer: Any, tokens: int) -> None:
    text = prompt_text(tokens, seed=tokens)
    assert len(tokenizer(text).input_ids) == tokens
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_every_word_is_one_token(tokenizer: Any) -> None:
    assert len(set(WORDS)) == len(WORDS)
    assert all(len(tokenizer(f" {word}").input_ids) == 1 for word in WORDS)


def test_special_tokens_have_qwens_ids(tokenizer: Any) -> None:
    ids = tokenizer.convert_tokens_to_ids
    assert ids("<|endoftext|>") == 151643
    assert tokenizer.eos_token_id == ids("<|im_end|>") == 151645
    assert ids("<|AUDIO|>") == 151646
    assert ids("<|IMAGE|>") == 151655
    assert ids("<|VIDEO|>") == 151656


def test_any_text_survives_a_round_trip(tokenizer: Any) -> None:
    text = "Grüße, 世界! \n\t{}"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


@pytest.mark.parametrize("token", [256, 5_000, 151_642])
def test_ids_a_model_can_produce_are_visible(tokenizer: Any, token: int) -> None:
    assert tokenizer.decode([token]).strip()


def test_template_marks_every_modality(tokenizer: Any) -> None:
    parts = [{"type": kind} for kind in ("image", "audio", "video")]
    message = {"role": "user", "content": [*parts, {"type": "text", "text": "hi"}]}
    text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    for name in ("IMAGE", "AUDIO", "VIDEO"):
        assert text.count(f"<|{name}|>") == 1
    assert text.endswith("hi<|im_end|>\n<|im_start|>assistant\n")
