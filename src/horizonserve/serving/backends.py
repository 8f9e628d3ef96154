"""What caps a stage: the backend that the settings ask for, on the device of its worker."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

from horizonserve.config import Settings
from horizonserve.spatial.backend import Backend
from horizonserve.spatial.cores import CoresBackend
from horizonserve.spatial.cpu_proxy import CpuProxy
from horizonserve.spatial.driver import Device
from horizonserve.spatial.green import GreenBackend, refusals
from horizonserve.spatial.ladder import Die, Side, aligned, choose, existing, smallest
from horizonserve.spatial.null import NullBackend
from horizonserve.spatial.nvml import NvmlSource
from horizonserve.spatial.pressure import Source

#: What ``dry-run`` decides about where there is no GPU: an H100.
_MODEL_DIE: Final = Die(132, *smallest((9, 0)))


def before(worker: Any, method: str, action: Callable[[], None]) -> None:
    """Do something before a worker does what ``method`` says."""
    stock = getattr(worker, method)

    def action_first(*args: Any, **kwargs: Any) -> Any:
        action()
        return stock(*args, **kwargs)

    setattr(worker, method, action_first)


def make_backend(
    worker: Any, side: Side, name: str, settings: Settings, graphs: bool
) -> tuple[Backend, Source]:
    """What caps this process, and where its pressure is measured.

    Args:
        worker: of vLLM or vLLM-Omni, its device initialised.
        side: whose SMs of a level this process takes.
        name: ``green``, ``cores`` or ``dry-run``.
        settings: bounds of the ladder, and which pressure.
        graphs: whether vLLM captures graphs for this stage.

    Raises:
        RuntimeError: a driver call failed.
        ValueError: this stage cannot be capped so; the message says why.
    """
    bounds = settings.s_min_sms, settings.s_cap_sms
    if name == "cores":
        import torch

        cores = CoresBackend(side, torch.set_num_threads, torch.get_num_threads(), *bounds)
        return cores, CpuProxy()
    if worker.device.type != "cuda":
        if name == "green":
            raise ValueError(
                "spatial_backend=green needs a CUDA device; give cores to cap CPU cores"
            )
        found = existing(_MODEL_DIE, aligned(_MODEL_DIE))
        return NullBackend(choose(_MODEL_DIE, found, *bounds)), CpuProxy()
    device = Device(worker.device.index or 0)
    gpm = settings.pressure == "dram"
    source = NvmlSource(device.nvml_uuid, gpm=gpm)
    levels = choose(device.die, device.levels(), *bounds)
    if name == "dry-run":
        return NullBackend(levels), source
    if reasons := refusals(device.mps):
        raise ValueError("; ".join(reasons))
    from horizonserve.spatial.torch_streams import TorchStreams

    green = GreenBackend(device, levels, side, TorchStreams(worker.device.index or 0))
    return (_with_graphs(worker, green) if graphs else green), source


def _with_graphs(worker: Any, green: GreenBackend) -> Backend:
    from horizonserve.serving.graphs import GraphSets

    runner = worker.model_runner
    sets = GraphSets(runner, green)
    runner.capture_model = functools.partial(sets.capture, runner.capture_model)
    before(worker, "shutdown", sets.clear)
    return sets
