"""What an image stage needs on a CPU: its attention and its number types.

vLLM-Omni's diffusion worker itself has nothing of a GPU's where one process is the whole stage,
which it is on one device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl
from vllm_omni.diffusion.worker.diffusion_model_runner import DiffusionModelRunner

from horizonserve.serving import compat
from horizonserve.serving.cpu import REQUIRED_DIFFUSION

compat.require(REQUIRED_DIFFUSION)


class CPUDiffusionAttention(SDPAImpl):
    """Torch's attention. vLLM-Omni has it too, but chooses it by device, from those it knows."""

    # The one for XPU is torch's and nothing else.
    forward = SDPAImpl.forward_xpu


class CPUDiffusionBackend(SDPABackend):
    """How the diffusion layers find it."""

    @staticmethod
    def get_impl_cls() -> type[CPUDiffusionAttention]:
        """Class that computes the attention."""
        return CPUDiffusionAttention


class CPUDiffusionModelRunner(DiffusionModelRunner):
    """Runner of an image stage."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the pipeline, and have its layers take any floating-point input.

        On a GPU, autocast turns the input into the type of the weights. Pipelines switch it off on
        a CPU (BAGEL's does), though they give bfloat16 layers float32 inputs there as well.
        """
        super().load_model(*args, **kwargs)
        for module in self.pipeline.modules() if self.pipeline is not None else ():
            if isinstance(module, nn.Linear | nn.Conv2d):
                module.register_forward_pre_hook(_cast_input)


def _cast_input(module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(value.to(module.weight.dtype) for value in inputs)
