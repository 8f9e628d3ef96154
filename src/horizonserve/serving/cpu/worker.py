"""Stage workers: vLLM's CPU worker around vLLM-Omni's model runners.

vLLM-Omni's runners derive from vLLM's GPU runner, and vLLM's CPU runner is that same GPU runner
with a few methods replaced. Laying the CPU replacements over the omni runners is therefore all
that a CPU stage needs.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.cpu_model_runner import (
    CPUModelRunner,
    _set_torch_accelerator_to_noop,
    _torch_cuda_wrapper,
)
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner
from vllm_omni.worker.gpu_generation_model_runner import GPUGenerationModelRunner
from vllm_omni.worker.mixins import OmniWorkerMixin

from horizonserve.serving import compat
from horizonserve.serving.cpu import REQUIRED
from horizonserve.serving.cpu.kv_layout import send_plain

compat.require(REQUIRED)


def _not_capturing() -> bool:
    """A CPU has no streams, so none of them records a graph."""
    return False


class _HostMemory:
    """What vLLM's CPU runner replaces in the GPU runner, for any runner it is mixed into."""

    _init_device_properties = CPUModelRunner._init_device_properties
    _postprocess_tensors = CPUModelRunner._postprocess_tensors
    _postprocess_triton = CPUModelRunner._postprocess_triton
    _sync_device = CPUModelRunner._sync_device
    _to_list = CPUModelRunner._to_list
    _zero_block_ids = CPUModelRunner._zero_block_ids
    get_model = CPUModelRunner.get_model

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        # The GPU constructor asks for streams, events and memory pools; both calls make these
        # harmless on a machine that has none.
        _set_torch_accelerator_to_noop()
        # Some models ask in their forward pass; torch raises where there is no CUDA driver.
        torch.cuda.is_current_stream_capturing = _not_capturing
        with _torch_cuda_wrapper():
            super().__init__(vllm_config, device)  # type: ignore[call-arg]
        self.use_cuda_graph = False
        self.cascade_attn_enabled = False
        self._postprocess_tensors()
        self._postprocess_triton()

    def warming_up_model(self) -> None:
        """Run one profiling forward, compiled or not."""
        self.profile_run()  # type: ignore[attr-defined]


class CPUARModelRunner(_HostMemory, GPUARModelRunner):
    """Runner of an autoregressive stage (thinker, talker)."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        send_plain(self.kv_transfer_manager)


class CPUGenerationModelRunner(_HostMemory, GPUGenerationModelRunner):
    """Runner of a one-pass generation stage (code2wav)."""


class CPUARWorker(OmniWorkerMixin, CPUWorker):
    """Worker of an autoregressive stage."""

    model_runner_cls: type = CPUARModelRunner

    def init_device(self) -> None:
        """Set up the process group and build the stage's model runner."""
        super().init_device()
        self.model_runner = self.model_runner_cls(self.vllm_config, self.device)

    def _should_warm_up_model(self) -> bool:
        # The Qwen2.5-Omni talker chooses its voice in its first forward; without the profiling
        # forward the first audio request finds no voice and the stage dies.
        return True


class CPUGenerationWorker(OmniWorkerMixin, CPUWorker):
    """Worker of a one-pass generation stage."""

    model_runner_cls: type = CPUGenerationModelRunner

    def init_device(self) -> None:
        """Set up the process group and build the stage's model runner."""
        super().init_device()
        self.model_runner = self.model_runner_cls(self.vllm_config, self.device)
