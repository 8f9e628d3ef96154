"""The platform class: which workers a stage uses, and how much memory the host has."""

from __future__ import annotations

import os

import psutil
import torch
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum

# Defaults for the stage processes, which inherit the environment; a value the user set stays.
#  * vLLM pins each engine's threads to cores as if it were alone on the machine, so every stage
#    of a pipeline would be pinned to the same core.
#  * vLLM adds a worker process to each engine to set up that pinning. Without pinning there is
#    nothing to set up, and a stage is one process, as it is on one GPU: half the start-up time,
#    and scheduler and forward pass share a thread.
for _name, _value in {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}.items():
    os.environ.setdefault(_name, _value)


class CPUOmniPlatform(OmniPlatform, CpuPlatform):
    """vLLM-Omni on the host CPU, with vLLM's own CPU platform underneath."""

    _omni_enum = OmniPlatformEnum.OOT

    @classmethod
    def get_omni_ar_worker_cls(cls) -> str:
        """Worker of the autoregressive stages."""
        return "horizonserve.serving.cpu.worker.CPUARWorker"

    @classmethod
    def get_omni_generation_worker_cls(cls) -> str:
        """Worker of the one-pass generation stages, such as code2wav."""
        return "horizonserve.serving.cpu.worker.CPUGenerationWorker"

    @classmethod
    def get_diffusion_attn_backend_cls(
        cls, selected_backend: str | None, head_size: int, allow_trtllm_default: bool = False
    ) -> str:
        """Torch's own attention, the only diffusion backend without a GPU kernel."""
        return "horizonserve.serving.cpu.diffusion.CPUDiffusionBackend"

    @classmethod
    def get_diffusion_model_runner_cls(cls) -> str:
        """Runner of the image stages; vLLM-Omni's own worker drives it."""
        return "horizonserve.serving.cpu.diffusion.CPUDiffusionModelRunner"

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        """Compilation is off: it costs minutes of start-up and the stages run eager."""
        return False

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        """The host, whatever the rank."""
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls) -> int:
        """One host is one device; stages share it."""
        return 1

    @classmethod
    def get_device_version(cls) -> str | None:
        """A CPU has no compute capability."""
        return None

    @classmethod
    def synchronize(cls) -> None:
        """Nothing runs asynchronously."""

    @classmethod
    def get_free_memory(cls, device: torch.device | None = None) -> int:
        """Available host memory in bytes."""
        return int(psutil.virtual_memory().available)

    @classmethod
    def get_device_memory(cls, device: torch.device | None = None) -> tuple[int, int]:
        """Available and total host memory in bytes."""
        memory = psutil.virtual_memory()
        return int(memory.available), int(memory.total)

    # The diffusion worker calls these; vLLM would look them up in ``torch.cpu``, which has none.

    @classmethod
    def empty_cache(cls) -> None:
        """There is no caching allocator to empty."""

    @classmethod
    def reset_peak_memory_stats(cls) -> None:
        """There are no allocator statistics."""

    @classmethod
    def max_memory_allocated(cls) -> int:
        """Peak bytes held by a caching allocator: none."""
        return 0

    @classmethod
    def max_memory_reserved(cls) -> int:
        """Peak bytes reserved by a caching allocator: none."""
        return 0
