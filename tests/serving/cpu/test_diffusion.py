"""An image stage's attention and layers on a CPU."""

from __future__ import annotations

import importlib

import pytest

pytestmark = pytest.mark.vllm
torch = pytest.importorskip("torch")
pytest.importorskip("vllm_omni")


def test_platform_names_classes_that_exist() -> None:
    from horizonserve.serving.cpu.platform import CPUOmniPlatform

    for path in (
        CPUOmniPlatform.get_diffusion_attn_backend_cls(None, 32),
        CPUOmniPlatform.get_diffusion_model_runner_cls(),
        CPUOmniPlatform.get_diffusion_worker_cls(),
    ):
        module, _, name = path.rpartition(".")
        assert isinstance(getattr(importlib.import_module(module), name), type)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_softmax_of_the_scaled_product(causal: bool) -> None:
    from horizonserve.serving.cpu.diffusion import CPUDiffusionBackend

    query, key, value = torch.randn(3, 1, 6, 4, 32)  # batch, token, head, element
    attention = CPUDiffusionBackend.get_impl_cls()(4, 32, 0.5, causal=causal)
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * 0.5
    if causal:
        scores += torch.full((6, 6), float("-inf")).triu(1)
    expected = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), value)
    torch.testing.assert_close(attention.forward(query, key, value), expected)


def test_layers_take_another_float_type(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_omni.diffusion.worker.diffusion_model_runner import DiffusionModelRunner

    from horizonserve.serving.cpu.diffusion import CPUDiffusionModelRunner

    layer = torch.nn.Linear(4, 4).bfloat16()
    monkeypatch.setattr(DiffusionModelRunner, "load_model", lambda self: None)
    runner = CPUDiffusionModelRunner.__new__(CPUDiffusionModelRunner)
    runner.pipeline = torch.nn.Sequential(layer)
    with pytest.raises(RuntimeError, match="dtype"):
        layer(torch.ones(1, 4))
    runner.load_model()
    assert layer(torch.ones(1, 4)).dtype is torch.bfloat16
