"""Which stages get our scheduler, on vLLM-Omni's own registry."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_omni.config.pipeline_registry import OMNI_PIPELINES, resolve_pipeline_config

from horizonserve.serving import pipelines
from horizonserve.slo import Output

pytestmark = pytest.mark.vllm


@pytest.fixture
def registry() -> Iterator[dict[str, Any]]:
    before = dict(OMNI_PIPELINES)
    yield before
    OMNI_PIPELINES.clear()
    OMNI_PIPELINES.update(before)


@pytest.mark.parametrize("model_type", ["qwen2_5_omni", "mimo_audio", "bagel"])
def test_only_the_shared_stage_changes(registry: dict[str, Any], model_type: str) -> None:
    pipelines.install()
    before, after = registry[model_type], resolve_pipeline_config(model_type)
    assert after.stages[0].scheduler_cls == pipelines.SCHEDULER
    assert after.stages[1:] == before.stages[1:]


def test_every_pipeline_keeps_what_is_its_own(registry: dict[str, Any]) -> None:
    pipelines.install()
    kept = 0
    for model_type, before in registry.items():
        after = OMNI_PIPELINES[model_type]
        if callable(before):
            assert after is not before
            continue
        for old, new in zip(before.stages, after.stages, strict=True):
            if old.scheduler_cls is not None or old.stage_id != 0:
                assert new == old
                kept += 1
    assert kept > 40
    (own,) = [k for k, v in registry.items() if "voxcpm2" in k and not callable(v)]
    assert registry[own].stages[0].scheduler_cls
    assert OMNI_PIPELINES[own] is registry[own]


def test_a_pipeline_that_is_resolved_late_changes_too(registry: dict[str, Any]) -> None:
    OMNI_PIPELINES["late"] = lambda config: registry["qwen2_5_omni"]
    pipelines.install()
    resolved = resolve_pipeline_config("late", hf_config=None)
    assert resolved.stages[0].scheduler_cls == pipelines.SCHEDULER


def test_a_resolver_may_refuse_a_configuration(registry: dict[str, Any]) -> None:
    # Models found by architecture, such as MiMo-Audio, are offered to every resolver in turn.
    OMNI_PIPELINES["late"] = lambda config: None
    pipelines.install()
    assert OMNI_PIPELINES["late"](object()) is None


def test_installing_again_changes_nothing(registry: dict[str, Any]) -> None:
    assert pipelines.install() > 30
    after = dict(OMNI_PIPELINES)
    assert pipelines.install() == 0
    assert after == OMNI_PIPELINES


@pytest.mark.parametrize(
    ("stage", "arch", "outputs"),
    [
        (
            "thinker",
            "Qwen2_5OmniForConditionalGeneration",
            {0: Output.TEXT, 2: Output.AUDIO},
        ),
        ("thinker", "OmniBagelForConditionalGeneration", {0: Output.TEXT, 1: Output.IMAGE}),
        ("fused_thinker_talker", "MiMoAudioModel", {0: Output.TEXT, 1: Output.AUDIO}),
        ("thinker", "Unknown", {}),
    ],
)
def test_outputs_of_a_stage_process_by_its_own_name(
    stage: str, arch: str, outputs: dict[int, Output]
) -> None:
    config = SimpleNamespace(model_stage=stage, model_arch=arch, hf_config=None)
    assert pipelines.final_outputs(config) == outputs
