"""A CPU platform for vLLM-Omni, which ships none.

With it ``vllm-omni serve MODEL --omni`` runs every autoregressive, generation and image stage of a
pipeline without a GPU, through the same API server, orchestrator, schedulers and stage
processes. It is found through the ``vllm_omni.platform_plugins`` entry point and stays out of
the way wherever vLLM itself has chosen another device.
"""

from __future__ import annotations

PLATFORM = "horizonserve.serving.cpu.platform.CPUOmniPlatform"

# Names the workers borrow that upstream does not promise to keep: (module, attribute path).
# The start-up check resolves each one, so that a moved name is reported before a stage dies.
REQUIRED: tuple[tuple[str, str], ...] = (
    ("vllm._custom_ops", "cpu_attn_reshape_and_cache"),
    ("vllm.v1.attention.backends.cpu_attn", "_get_attn_isa"),
    ("vllm.v1.worker.cpu_model_runner", "CPUModelRunner._init_device_properties"),
    ("vllm.v1.worker.cpu_model_runner", "CPUModelRunner._postprocess_tensors"),
    ("vllm.v1.worker.cpu_model_runner", "CPUModelRunner._postprocess_triton"),
    ("vllm.v1.worker.cpu_model_runner", "CPUModelRunner._sync_device"),
    ("vllm.v1.worker.cpu_model_runner", "CPUModelRunner._to_list"),
    ("vllm.v1.worker.cpu_model_runner", "CPUModelRunner._zero_block_ids"),
    ("vllm.v1.worker.cpu_model_runner", "CPUModelRunner.get_model"),
    ("vllm.v1.worker.cpu_model_runner", "_set_torch_accelerator_to_noop"),
    ("vllm.v1.worker.cpu_model_runner", "_torch_cuda_wrapper"),
    ("vllm.v1.worker.cpu_worker", "CPUWorker._should_warm_up_model"),
    (
        "vllm_omni.distributed.omni_connectors.kv_transfer_manager",
        "OmniKVTransferManager._extract_kv_cache",
    ),
    ("vllm_omni.worker.gpu_ar_model_runner", "GPUARModelRunner.profile_run"),
    ("vllm_omni.worker.gpu_generation_model_runner", "GPUGenerationModelRunner.profile_run"),
    ("vllm_omni.worker.mixins", "OmniWorkerMixin"),
)
# The same for image stages; others do not load these modules.
REQUIRED_DIFFUSION: tuple[tuple[str, str], ...] = (
    ("vllm_omni.diffusion.attention.backends.sdpa", "SDPABackend.get_impl_cls"),
    ("vllm_omni.diffusion.attention.backends.sdpa", "SDPAImpl.forward_xpu"),
    (
        "vllm_omni.diffusion.worker.diffusion_model_runner",
        "DiffusionModelRunner.load_model",
    ),
)


def cpu_platform() -> str | None:
    """Return the dotted path of the platform class where vLLM runs on a CPU, else ``None``."""
    try:
        from vllm.platforms import current_platform
    except ImportError:
        return None
    return PLATFORM if current_platform.is_cpu() else None
