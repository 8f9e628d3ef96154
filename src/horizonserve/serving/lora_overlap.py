"""Where base-LoRA overlap meets vLLM: one method of its LoRA layers (HALO 4).

With ``VLLM_LORA_ENABLE_DUAL_STREAM`` the linear layers with LoRA call ``_apply_async_impl`` from an
operator that torch.compile does not look into. Ours runs base and LoRA layer on the two sides of
the split that the table names. That happens while a CUDA graph is captured, where the streams
become part of the graph, so a replay of that size runs so too. What runs eagerly, which long
prefills do, runs one after the other, and so do numbers of tokens that are not in the table.

The stream is asked whether it is being captured, as vLLM's V2 runner captures its full graphs with
a forward context that says NONE.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from horizonserve import facts
from horizonserve.config import Settings, load
from horizonserve.lora import table as tables
from horizonserve.lora.parallel import Fork, Overlap, Pair, Work, forks, run
from horizonserve.lora.table import Adapters, Kind, Table, TableError
from horizonserve.serving import compat, profiles
from horizonserve.spatial.driver import Device

logger = logging.getLogger(f"vllm.{__name__}")

ENV_DUAL_STREAM: Final = "VLLM_LORA_ENABLE_DUAL_STREAM"
_LAYERS: Final = "vllm.lora.layers.base_linear"

#: The last part of a layer's name, which vLLM's decoder models share.
KIND_OF: Final[Mapping[str, Kind]] = {
    "qkv_proj": "qkv",
    "o_proj": "o",
    "gate_up_proj": "gate_up",
    "down_proj": "down",
}


class LoraLayers:
    """Runs the LoRA layers of this process as a table says."""

    def __init__(
        self,
        table: Table,
        forks: Mapping[Pair, Fork],
        overlap: Overlap,
        capturing: Callable[[], bool],
    ) -> None:
        """Take a table and what was made of it.

        Args:
            table: the partitions.
            forks: one for each of the table's pairs.
            overlap: what of a LoRA layer runs beside its base layer.
            capturing: whether the current stream is being captured into a CUDA graph.
        """
        self._table, self._forks, self._overlap = table, forks, overlap
        self._capturing = capturing
        self._warm: set[tuple[str, int]] = set()

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """In the place of ``_apply_async_impl``.

        Args:
            layer: vLLM's linear layer with LoRA.
            x: tokens x inputs, or 1 x tokens x inputs.
            bias: of the base layer.
        """
        fork = self._fork(layer, x.numel() // x.shape[-1])
        if fork is None:
            return layer._apply_sync(x, bias)

        def base() -> torch.Tensor:
            quant_method = layer._get_quant_method()
            return quant_method.apply(layer.base_layer, x, bias)

        stacks = layer.lora_a_stacked, layer.lora_b_stacked
        parts = work(base, x, *stacks, layer.output_slices, layer.punica_wrapper)
        return run(fork, self._overlap, parts)

    def _fork(self, layer: Any, tokens: int) -> Fork | None:
        """What runs the layer at this many tokens; None for one after the other."""
        kind = KIND_OF.get(layer.base_layer.prefix.rpartition(".")[2])
        pair = None if kind is None else self._table.pair(kind, tokens)
        if kind is None or pair is None:
            return None
        shape = self._table.layers[kind]
        # Another part of the model may name a layer alike.
        if (layer.input_size, sum(layer.output_slices)) != (shape.inputs, shape.outputs):
            return None
        from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture

        if BreakableCUDAGraphCapture.is_active():
            return None  # nor does vLLM use two streams then
        if not self._capturing():
            # Once, so that kernels are loaded and workspaces there before anything is captured.
            if (kind, tokens) in self._warm:
                return None
            self._warm.add((kind, tokens))
        return self._forks[pair]


def work(
    base: Callable[[], torch.Tensor],
    x: torch.Tensor,
    lora_a: Sequence[torch.Tensor],
    lora_b: Sequence[torch.Tensor],
    slices: tuple[int, ...],
    punica: Any,
) -> Work[torch.Tensor, torch.Tensor]:
    """A layer with LoRA, with vLLM's kernels and in its order.

    Args:
        base: gives the base layer's output for ``x``.
        x: tokens x inputs, or 1 x tokens x inputs.
        lora_a: of each slice, adapters x 1 x rank x inputs.
        lora_b: of each slice, adapters x 1 x outputs x rank.
        slices: outputs of each slice.
        punica: vLLM's wrapper of its kernels, which knows each token's adapter.
    """
    flat = x.reshape(-1, x.shape[-1])

    def shrink() -> torch.Tensor:
        # Not zeroed: what is not written is not read either.
        shape = (len(slices), flat.shape[0], lora_b[0].shape[-1])
        shrunk = torch.empty(shape, dtype=torch.float32, device=x.device)
        punica.add_shrink(shrunk, flat, lora_a, 1.0)
        return shrunk

    def expand(output: torch.Tensor, shrunk: torch.Tensor) -> None:
        # A view, never a copy: it is written to.
        rows = output.view(-1, output.shape[-1])
        punica.add_expand(rows, shrunk, lora_b, slices, add_inputs=True)

    def zeros() -> torch.Tensor:
        return torch.zeros((*x.shape[:-1], sum(slices)), dtype=x.dtype, device=x.device)

    return Work(base, shrink, expand, zeros)


def unmet(*, fully_sharded: bool, ranks: int, eager: bool, cuda: bool) -> str | None:
    """Why base and LoRA layers cannot run side by side; None if they can.

    Args:
        fully_sharded: the setting ``fully_sharded_loras``.
        ranks: processes that share the model.
        eager: no CUDA graph is captured.
        cuda: the device is NVIDIA's.
    """
    if not cuda:
        return "it needs an NVIDIA GPU; remove it"
    if ranks > 1:
        return (
            f"{ranks} processes share the model, and the table is not yet the same in all of them;"
            " leave out --tensor-parallel-size and --pipeline-parallel-size, or remove it"
        )
    if fully_sharded:
        return "--fully-sharded-loras communicates inside the layer; leave it out, or remove it"
    if eager:
        return "it acts on CUDA graphs; leave out --enforce-eager, or remove it"
    return None


def prepare(args: Any, settings: Settings) -> None:
    """Check what can be checked at launch, and have vLLM's LoRA layers ask for two streams.

    Before vLLM's LoRA layers are imported, here or in a child. Exits with a message where base and
    LoRA layers could not run side by side.
    """
    from vllm.platforms import current_platform

    def refuse(why: str) -> None:
        sys.exit(f"horizonserve: lora_table={settings.lora_table!r}: {why}")

    if not args.enable_lora:
        refuse("there are no LoRA layers; give --enable-lora, or remove it")
    why = unmet(
        fully_sharded=args.fully_sharded_loras,
        ranks=args.tensor_parallel_size * args.pipeline_parallel_size,
        eager=args.enforce_eager,
        cuda=current_platform.is_cuda(),
    )
    if why is not None:
        refuse(why)
    try:
        # The device is not looked at: its driver would not survive a fork.
        _read(settings, Adapters(max_loras=args.max_loras, max_rank=args.max_lora_rank))
    except TableError as error:
        sys.exit(f"horizonserve: {error}")
    os.environ[ENV_DUAL_STREAM] = "1"
    if not _asks_for_two_streams():
        refuse(
            "vLLM's LoRA layers are imported already, without two streams; set"
            f" {ENV_DUAL_STREAM}=1 for the server"
        )


def _asks_for_two_streams() -> bool:
    """Whether vLLM's LoRA layers were, or will be, imported with two streams."""
    module = sys.modules.get(_LAYERS)
    on = os.environ.get(ENV_DUAL_STREAM, "0") == "1"
    return on and (module is None or hasattr(module, "lora_linear_async"))


def _read(settings: Settings, adapters: Adapters, vllm_config: Any | None = None) -> Table:
    """The table of the settings.

    Raises:
        TableError: it cannot be used here.
    """
    assert settings.lora_table is not None
    found = tables.load(settings.lora_table)
    here = vllm_config is not None
    different = found.mismatches(
        facts.platform() if here else None,
        profiles.model(vllm_config) if here else None,
        adapters,
        facts.versions(),
        settings.lora_overlap,
    )
    if different:
        raise TableError(
            f"{settings.lora_table}: {'; '.join(different)}; make one for this with"
            " `horizon-profile lora`, or remove lora_table"
        )
    return found


def install() -> None:
    """Have the workers that this process will make run their LoRA layers as the table says."""
    if not {"vllm.v1.engine.core", "vllm.v1.worker.worker_base"} & sys.modules.keys():
        return
    if load()[0].lora_table is None:
        return
    compat.require(compat.LORA_OVERLAP)
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    stock = WorkerWrapperBase.init_device
    if getattr(stock, "horizon_lora", False):
        return

    @functools.wraps(stock)
    def init_device(self: Any) -> None:
        stock(self)
        attach(self.worker)

    init_device.horizon_lora = True  # type: ignore[attr-defined]
    WorkerWrapperBase.init_device = init_device


def attach(worker: Any) -> None:
    """Replace the method, for a worker whose device is there but whose model is not.

    Where that cannot be, one warning says why, and LoRA layers run one after the other.
    """
    config = worker.vllm_config
    if config.lora_config is None:
        return
    settings, _ = load()
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

    try:
        layers = _layers(worker, config, settings)
    # Whatever it was, the server serves without.
    except (RuntimeError, ValueError, OSError) as error:
        logger.warning("HorizonServe: base and LoRA layers run one after the other: %s", error)
        BaseLinearLayerWithLoRA._apply_async_impl = BaseLinearLayerWithLoRA._apply_sync
        return

    def apply(self: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return layers.apply(self, x, bias)

    BaseLinearLayerWithLoRA._apply_async_impl = apply


def _layers(worker: Any, config: Any, settings: Settings) -> LoraLayers:
    """The LoRA layers of a worker.

    Raises:
        ValueError: a condition does not hold, or the device has no such partition.
        RuntimeError: a driver call failed.
    """
    from vllm.config import CUDAGraphMode

    lora, parallel = config.lora_config, config.parallel_config
    graphs = config.compilation_config
    why = unmet(
        fully_sharded=lora.fully_sharded_loras,
        ranks=parallel.world_size,
        eager=graphs.cudagraph_mode == CUDAGraphMode.NONE,
        cuda=worker.device.type == "cuda",
    )
    if why is None and parallel.use_ubatching:
        why = "microbatches would fork from several threads; switch --enable-dbo off"
    if why is None and not _asks_for_two_streams():
        why = f"{ENV_DUAL_STREAM}=1 was not set when vLLM's LoRA layers were imported; set it"
    if why is not None:
        raise ValueError(f"lora_table={settings.lora_table!r}: {why}")
    table = _read(settings, Adapters(max_loras=lora.max_loras, max_rank=lora.max_lora_rank), config)
    from horizonserve.spatial.torch_streams import TorchStreams

    index = worker.device.index or 0
    made = forks(Device(index), table.pairs, TorchStreams(index))
    _warm_in_profile(worker.model_runner, table, lora.max_loras)
    captured = sorted(graphs.cudagraph_capture_sizes or ())
    if without := tables.missing(table, captured):
        logger.info(
            "HorizonServe: lora_table has no rows for %s of %s captured sizes: %s",
            len(without),
            len(captured),
            without,
        )
    logger.info(
        "HorizonServe: base and LoRA layers side by side (%s) in %s partitions",
        settings.lora_overlap,
        len(made),
    )
    return LoraLayers(table, made, settings.lora_overlap, torch.cuda.is_current_stream_capturing)


def _warm_in_profile(runner: Any, table: Table, max_loras: int) -> None:
    """Have vLLM size its KV cache after every partition has its workspaces, which it keeps."""
    profile_run, dummy_run = runner.profile_run, runner._dummy_run

    def dummy_run_each(tokens: int, *args: Any, **kwargs: Any) -> Any:
        # The runner's own size first: that one is compiled.
        outcome = dummy_run(tokens, *args, **kwargs)
        for size in table.tokens:
            if size <= tokens:
                dummy_run(size, *args, **{**kwargs, "num_active_loras": max_loras})
        return outcome

    def profile_run_each() -> None:
        runner._dummy_run = dummy_run_each
        try:
            profile_run()
        finally:
            runner._dummy_run = dummy_run

    runner.profile_run = profile_run_each
