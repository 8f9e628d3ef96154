"""Where in a vLLM-Omni pipeline the scheduler goes, and what the pipeline's stages give out."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final

from horizonserve.slo import Output

SCHEDULER: Final = "horizonserve.serving.schedulers.ar_scheduler"


def install() -> int:
    """Give every registered pipeline's shared stage our scheduler; returns how many took it.

    The shared stage is stage 0 when it is autoregressive and others follow it. A stage with a
    scheduler of its own is left alone: that class carries rules that ours does not have.
    """
    from vllm_omni.config.pipeline_registry import OMNI_PIPELINES

    changed = 0
    for model_type, pipeline in list(OMNI_PIPELINES.items()):
        if callable(pipeline):
            if not getattr(pipeline, "horizonserve", False):
                OMNI_PIPELINES[model_type] = _resolver(pipeline)
                changed += 1
        elif (ours := _with_scheduler(pipeline)) is not pipeline:
            # Set directly: register_pipeline warns of every name it replaces.
            OMNI_PIPELINES[model_type] = ours
            changed += 1
    return changed


def _resolver(resolve: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def resolve_with_scheduler(hf_config: Any) -> Any:
        # A resolver answers None to a configuration that is not its own.
        pipeline = resolve(hf_config)
        return None if pipeline is None else _with_scheduler(pipeline)

    resolve_with_scheduler.horizonserve = True  # type: ignore[attr-defined]
    return resolve_with_scheduler


def _with_scheduler(pipeline: Any) -> Any:
    from vllm_omni.config.stage_config import StageExecutionType

    shared = next((stage for stage in pipeline.stages if stage.stage_id == 0), None)
    if (
        shared is None
        or len(pipeline.stages) < 2
        or shared.execution_type is not StageExecutionType.LLM_AR
        or shared.scheduler_cls is not None
    ):
        return pipeline
    stages = tuple(
        dataclasses.replace(stage, scheduler_cls=SCHEDULER) if stage is shared else stage
        for stage in pipeline.stages
    )
    return dataclasses.replace(pipeline, stages=stages)


def final_outputs(model_config: Any) -> Mapping[int, Output]:
    """Stage id -> output modality of the stages that answer the user.

    The stage process is not told its pipeline, so the pipeline is found by the stage's own name
    and architecture. An unknown one gives an empty mapping: long requests then count as audio.
    """
    from vllm_omni.config.pipeline_registry import OMNI_PIPELINES

    key = getattr(model_config, "model_stage", None), getattr(model_config, "model_arch", None)
    for pipeline in OMNI_PIPELINES.values():
        if callable(pipeline):
            # A resolver refuses configurations of models that are not its own.
            with contextlib.suppress(Exception):
                pipeline = pipeline(model_config.hf_config)
        for stage in getattr(pipeline, "stages", ()):
            arch = stage.model_arch or pipeline.model_arch
            if stage.stage_id == 0 and (stage.model_stage, arch) == key:
                return _outputs(pipeline)
    return {}


def _outputs(pipeline: Any) -> dict[int, Output]:
    known = {output.value: output for output in Output}
    return {
        stage.stage_id: known[stage.final_output_type]
        for stage in pipeline.stages
        if stage.final_output and stage.final_output_type in known
    }
