"""A tiny BAGEL: what both of its stages read from the directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from horizonserve.models import make_model
from horizonserve.models.words import prompt_text

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
DEPLOY = Path(__file__).parents[2] / "configs" / "deploy" / "bagel_tiny.yaml"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("vllm_omni")
    return make_model("bagel", "tiny", tmp_path_factory.mktemp("models") / "bagel")


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def tensors(path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(path)


def test_a_size_it_has_not_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("vllm_omni")
    with pytest.raises(ValueError, match="'small'.*tiny"):
        make_model("bagel", "small", tmp_path / "m")
    assert not list(tmp_path.iterdir())


def test_config_is_read_as_bagel(model: Path) -> None:
    from vllm.transformers_utils.config import get_config

    config = get_config(str(model), trust_remote_code=False)
    assert type(config).__name__ == "BagelConfig"
    assert config.llm_config.qk_norm
    assert config.vit_config.image_size == config.vit_max_num_patch_per_side * 14


def test_prompt_length_is_exact_and_image_tokens_are_known(tokenizer: Any) -> None:
    assert len(tokenizer(prompt_text(100)).input_ids) == 100
    image_tokens = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|fim_middle|>"]
    ids = tokenizer.convert_tokens_to_ids(image_tokens)
    assert len(set(ids)) == 4 and None not in ids
    assert all(
        tokenizer(token).input_ids == [i] for token, i in zip(image_tokens, ids, strict=True)
    )


def test_a_shown_image_is_one_placeholder(tokenizer: Any) -> None:
    content = [{"type": "image"}, {"type": "text", "text": " look"}]
    text = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    assert "<|image_pad|> look" in text and "<|IMAGE|>" not in text


def test_every_text_layer_has_an_image_twin(model: Path) -> None:
    weights = tensors(model / "ema.safetensors")
    layers = [
        name for name in weights if name.startswith("language_model.model.") and "embed" not in name
    ]
    text = {name: weights[name] for name in layers if "moe_gen" not in name}
    twins = {name.replace("_moe_gen", ""): weights[name] for name in layers if "moe_gen" in name}
    assert text.keys() == twins.keys()
    assert all(text[name].shape == twins[name].shape for name in text)
    projections = [name for name in text if name.endswith("_proj.weight")]
    assert projections and not any(text[name].equal(twins[name]) for name in projections)


def test_autoencoder_is_the_one_the_image_stage_builds(model: Path) -> None:
    weights = tensors(model / "ae.safetensors")
    assert sum(value.numel() for value in weights.values()) == 83_819_683
    assert {name.partition(".")[0] for name in weights} == {"encoder", "decoder"}


def test_the_largest_image_is_what_the_stage_draws_at_start(model: Path) -> None:
    from horizonserve.models.bagel import LATENT_PATCH, VAE

    positions = tensors(model / "ema.safetensors")["latent_pos_embed.pos_embed"]
    assert positions.shape[0] ** 0.5 * LATENT_PATCH * VAE["downsample"] == 512


def test_deploy_file_is_for_these_stages() -> None:
    from vllm_omni.config.pipeline_registry import OMNI_PIPELINES

    deploy = yaml.safe_load(DEPLOY.read_text())
    stages = [stage["stage_id"] for stage in deploy["stages"]]
    assert stages == [stage.stage_id for stage in OMNI_PIPELINES["bagel"].stages]
    assert deploy["dtype"] == "bfloat16"
