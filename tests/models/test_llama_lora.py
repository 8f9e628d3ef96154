"""The Llama with adapters: what is in its directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

pytest.importorskip("transformers")
from horizonserve.models import make_model
from horizonserve.models.llama_lora import ADAPTERS, RANK, SERVICES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_model_and_adapters(tmp_path: Path) -> None:
    from safetensors import safe_open

    model = make_model("llama-lora", "tiny", tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert sorted(path.name for path in (model / ADAPTERS).iterdir()) == sorted(SERVICES)
    seen = []
    for service in SERVICES:
        folder = model / ADAPTERS / service
        assert json.loads((folder / "adapter_config.json").read_text())["r"] == RANK
        with safe_open(folder / "adapter_model.safetensors", "pt") as file:
            weights = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        assert len(weights) == config["num_hidden_layers"] * 3 * 2
        seen.append(next(iter(weights.values())).flatten()[0].item())
    assert len(set(seen)) == len(SERVICES)  # four different adapters


def test_its_services_are_those_of_the_shipped_table() -> None:
    table = Path(__file__).parents[2] / "configs" / "services" / "hospital.yaml"
    assert set(yaml.safe_load(table.read_text())["services"]) == set(SERVICES)
