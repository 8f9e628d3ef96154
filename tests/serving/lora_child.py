"""Workers on the fake driver that get their LoRA layers from tables; prints a line for each.

Argument: a JSON list of what the environment has for each of them.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "spatial" / "fakes"))
from fake_torch import Streams, current  # noqa: E402
from vllm.config import CUDAGraphMode

from horizonserve import facts
from horizonserve.profile import Platform
from horizonserve.serving import lora_overlap
from horizonserve.spatial import torch_streams

torch_streams.TorchStreams = Streams  # type: ignore[assignment, misc]
facts.platform = lambda: Platform(device="fake device", units=132)
torch.cuda.is_current_stream_capturing = lambda: True


class Layer:
    """What a LoRA layer has that ours asks for."""

    base_layer = SimpleNamespace(prefix="model.layers.0.self_attn.o_proj")
    input_size, output_slices = 4, (4,)
    lora_a_stacked = lora_b_stacked = (torch.zeros(1, 1, 4, 4),)

    def __init__(self) -> None:
        self.ran_on: list[tuple[str, int]] = []
        self.punica_wrapper = SimpleNamespace(
            add_shrink=lambda *_: self.ran_on.append(("shrink", current[0])),
            add_expand=lambda *_, add_inputs: self.ran_on.append(("expand", current[0])),
        )

    def _get_quant_method(self) -> Any:
        return SimpleNamespace(apply=self._base)

    def _base(self, _layer: Any, x: torch.Tensor, _bias: Any) -> torch.Tensor:
        self.ran_on.append(("base", current[0]))
        return x.clone()


class Kept(logging.Handler):
    """What was said."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def attached(environment: dict[str, str]) -> dict[str, Any]:
    """What came of a worker in this environment."""
    os.environ |= environment
    config = SimpleNamespace(
        lora_config=SimpleNamespace(fully_sharded_loras=False, max_loras=3, max_lora_rank=8),
        parallel_config=SimpleNamespace(world_size=1, use_ubatching=False),
        compilation_config=SimpleNamespace(
            cudagraph_mode=CUDAGraphMode.FULL, cudagraph_capture_sizes=[8, 16]
        ),
        model_config=SimpleNamespace(
            model="m",
            architecture=os.environ.get("ARCHITECTURE"),
            dtype=torch.bfloat16,
            hf_text_config=SimpleNamespace(hidden_size=64, num_hidden_layers=2),
        ),
    )
    runner = SimpleNamespace(profile_run=lambda: None, _dummy_run=lambda *_, **__: None)
    stock = runner.profile_run
    worker = SimpleNamespace(
        vllm_config=config, device=SimpleNamespace(type="cuda", index=0), model_runner=runner
    )
    logged = Kept()
    lora_overlap.logger.addHandler(logged)
    lora_overlap.attach(worker)
    lora_overlap.logger.removeHandler(logged)
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA as Stock

    layer: Any = Layer()
    sequential = Stock._apply_async_impl is Stock._apply_sync
    if not sequential:
        for tokens in (8, 16):
            layer._apply_sync = lambda x, _bias: layer.ran_on.append(("all", current[0]))
            Stock._apply_async_impl(layer, torch.ones(tokens, 4))
    streams = [stream for _, stream in layer.ran_on]
    return {
        "logged": logged.said,
        "sequential": sequential,
        "ran": [what for what, _ in layer.ran_on],
        "outside": [stream == 0 for stream in streams],
        "different": len(set(streams)),
        "profiles": runner.profile_run is not stock,
    }


for each in json.loads(sys.argv[1]):
    print(json.dumps(attached(each)))
