"""The MiMo-Audio model as its engine reads it: pipeline, token ids, what it produces, codec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm_omni")

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer, Qwen2Model

from horizonserve.models import make_model
from horizonserve.models.mimo_audio import AUDIO_TOKENIZER, EMPTY_ID
from horizonserve.models.tokenizer import FIRST_SPECIAL_ID, FIRST_WORD_ID

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("mimo-audio", "tiny", tmp_path_factory.mktemp("models") / "mimo", seed=3)


@pytest.fixture(scope="module")
def weights(model: Path) -> dict[str, torch.Tensor]:
    return load_file(model / "model.safetensors")


def part(weights: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}


def test_vllm_omni_finds_the_pipeline(model: Path) -> None:
    from vllm_omni.config.config_factory import StageConfigFactory

    # The configuration calls itself qwen2; the architecture decides.
    pipeline = StageConfigFactory.get_pipeline_config(model=str(model), trust_remote_code=False)
    assert pipeline is not None
    assert pipeline.model_type == "mimo_audio"


def test_tokens_have_the_ids_the_engine_compares(model: Path) -> None:
    from vllm_omni.model_executor.models.mimo_audio import config_mimo_audio as ids
    from vllm_omni.model_executor.models.mimo_audio.mimo_audio_code2wav import MiMoAudioCodes

    codes = MiMoAudioCodes.from_tokenizer(AutoTokenizer.from_pretrained(model))
    assert codes.empty == EMPTY_ID == ids.TALKER_CODEC_PAD_TOKEN_ID
    assert codes.sostm == ids.SPAN_CODEC_START_TOKEN_ID
    assert codes.eostm == ids.NO_INTERLEAVE_NEXT_TOKEN_ID
    assert codes.eot == ids.SPAN_CODEC_END_TOKEN_ID
    assert (codes.pad, codes.im_end, codes.sosp, codes.eosp) == (151643, 151645, 151665, 151666)


def test_template_marks_audio(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    message = {"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": "hi"}]}
    text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>user\n<|sosp|><|empty|><|eosp|>hi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_words_and_sound_alternate(model: Path, weights: dict[str, torch.Tensor]) -> None:
    decoder = Qwen2Model(AutoConfig.from_pretrained(model)).to(torch.bfloat16)
    decoder.load_state_dict(part(weights, "model."))

    def best(last: torch.Tensor) -> int:
        """Id that follows a short prompt and then ``last``, an embedding."""
        prompt = decoder.embed_tokens(torch.tensor([151644, 300, 10]))
        with torch.no_grad():
            hidden = decoder(inputs_embeds=torch.cat([prompt, last])[None]).last_hidden_state
            return int((hidden[0, -1] @ weights["lm_head.weight"].T).argmax())

    # What the engine feeds back for <|empty|> is the group's codes through this matrix.
    group = torch.randn(8, weights["speech_group_downcast.weight"].shape[1], dtype=torch.bfloat16)
    sounds = group @ weights["speech_group_downcast.weight"].T
    for word, sound in zip(range(FIRST_WORD_ID, FIRST_SPECIAL_ID, 20_000), sounds, strict=True):
        assert best(decoder.embed_tokens(torch.tensor([word]))) == EMPTY_ID
        assert FIRST_WORD_ID <= best(sound[None]) < FIRST_SPECIAL_ID


def test_stage_0_has_every_weight_but_those_the_engine_computes(
    model: Path, weights: dict[str, torch.Tensor]
) -> None:
    from vllm_omni.model_executor.models.mimo_audio.config_mimo_audio import MiMoAudioConfig

    config = MiMoAudioConfig.from_pretrained(model)
    for prefix, shape in (
        ("local_transformer.", config.local_config()),
        ("input_local_transformer.", config.input_local_config()),
    ):
        transformer: Any = Qwen2Model(shape)
        transformer.embed_tokens = None
        transformer.load_state_dict(part(weights, prefix))
    for i, size in enumerate(config.parsed_speech_vocab_sizes()):
        for name in ("speech_embeddings", "local_transformer_lm_heads"):
            assert weights[f"{name}.{i}.weight"].shape == (size, config.local_dim)


def test_codec_turns_sound_into_groups_of_codes_and_back(model: Path) -> None:
    from vllm_omni.model_executor.models.mimo_audio.mimo_audio_code2wav import get_tokenizer_worker

    path = str(model / AUDIO_TOKENIZER)
    codec = get_tokenizer_worker("cpu", path, path)
    second = torch.randn(24_000, generator=torch.Generator().manual_seed(0))
    codes = codec.encode((second, 24_000))
    assert codes.shape == (8, 28)  # 25 codes a second and a little, in whole groups of 4
    assert len(codes[0].unique()) > 1
    sound = codec.decode(codes)
    assert sound.shape == (28 * 960,)
    assert sound.isfinite().all()
    assert sound.std() > 0


def test_same_seed_gives_the_same_files(model: Path, tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    again = make_model("mimo-audio", "tiny", tmp_path / "again", seed=3)
    other = make_model("mimo-audio", "tiny", tmp_path / "other", seed=4)
    assert torch.equal(torch.random.get_rng_state(), state)
    for file in (p.relative_to(again) for p in again.rglob("*") if p.is_file()):
        assert (again / file).read_bytes() == (model / file).read_bytes()
        differs = file.name in ("model.safetensors", "horizonserve.json")
        assert ((again / file).read_bytes() != (other / file).read_bytes()) == differs


def test_only_tiny_exists(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="size: mimo-audio has tiny, not 'small'"):
        make_model("mimo-audio", "small", tmp_path / "m")
    assert not list(tmp_path.iterdir())
