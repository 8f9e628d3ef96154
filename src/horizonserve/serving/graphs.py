"""One set of CUDA graphs per SM level, for a capped stage that does not run eagerly.

A kernel in a graph runs on the SMs of the stream that it was captured on, whatever stream replays
it. So vLLM captures its graphs once per level, each time on that level's stream, and the sets are
swapped between forwards: vLLM's wrappers look their graphs up in a dictionary, and what changes is
which dictionary they have. The dispatcher knows nothing of levels; every set has the same graphs.

What follows it: every wrapper of vLLM's V1 model runner, so the modes FULL, PIECEWISE,
FULL_DECODE_ONLY and FULL_AND_PIECEWISE, split by Dynamo or by Inductor, with draft models, and
vLLM-Omni's wrapped ``talker_mtp``.

What does not: graphs that a model captures by itself, on a side stream of the primary context,
which is never capped. MiMo-Audio makes some at load, even with enforce_eager; other models make
theirs at load or at their first requests. ``live_graphs`` counts those that there are, and
``GraphSets.capture`` warns of them.

Memory: all sets are in vLLM's one graph pool. That is safe, as torch gives memory that a capture
has released only to captures on the same stream, so two sets never lie on each other. For the same
reason it saves nothing: a set per level takes as many times the memory of one, while vLLM sizes
the KV cache for one.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.compilation.monitor import set_cudagraph_capturing_enabled
from vllm.config import CUDAGraphMode
from vllm.distributed import parallel_state
from vllm.logger import init_logger
from vllm.v1.worker import gpu_model_runner

from horizonserve.spatial.backend import Backend
from horizonserve.spatial.ladder import Level

logger = init_logger(f"vllm.{__name__}")


def refusal(vllm_config: Any, per_level: bool) -> str | None:
    """Why a stage with this final configuration cannot be capped; None if it can.

    ``per_level`` is the setting ``graphs_per_level``.
    """
    mode = vllm_config.compilation_config.cudagraph_mode
    # Also with enforce_eager, which vLLM turns into this.
    if mode == CUDAGraphMode.NONE:
        return None
    if not per_level:
        return (
            f"cudagraph_mode {mode} replays kernels on the SMs that they were captured on, whatever"
            " the level; set enforce_eager on the stage, or graphs_per_level to capture one set of"
            " graphs per level"
        )
    elsewhere = [
        what
        for what, has in (
            (
                "the V2 model runner",
                getattr(vllm_config.model_config, "use_v2_model_runner", False),
            ),
            ("microbatching (ubatch_size, enable_dbo)", vllm_config.parallel_config.use_ubatching),
            ("VLLM_USE_BREAKABLE_CUDAGRAPH", is_breakable_cudagraph_enabled()),
            ("cudagraph_mm_encoder", vllm_config.compilation_config.cudagraph_mm_encoder),
        )
        if has
    ]
    if not elsewhere:
        return None
    return (
        f"cudagraph_mode {mode} cannot have graphs_per_level: {', '.join(elsewhere)} would keep"
        " graphs where levels do not reach them; switch that off, or set enforce_eager on the stage"
    )


def live_graphs() -> int:
    """CUDA graphs alive in this process. In an eager stage, all are the model's own.

    Walks all objects (a good part of a second) and misses those frozen out of garbage collection,
    as vLLM does once a worker is warm.
    """
    # By type: isinstance would ask every proxy in the process what it is.
    return sum(issubclass(type(each), torch.cuda.CUDAGraph) for each in gc.get_objects())


class GraphSets:
    """The sets of a stage process, as a backend that swaps them along with the level.

    One is in use at a time, after ``capture`` that of the whole. Only one thread may use it, the
    one that runs the forwards.

    Raises:
        ValueError: the runner is not vLLM's V1 runner, the only one whose graphs are in wrappers.
    """

    def __init__(self, runner: Any, backend: Backend) -> None:
        if not isinstance(runner, gpu_model_runner.GPUModelRunner):
            raise ValueError(f"{type(runner).__name__} has no graphs that can follow a level")
        self._backend = backend
        self._sets: dict[Level, tuple[tuple[CUDAGraphWrapper, dict[Any, Any]], ...]] = {}
        self._in_use: Level | None = None

    @property
    def levels(self) -> tuple[Level, ...]:
        """Those of the backend."""
        return self._backend.levels

    def activate(self, level: Level) -> AbstractContextManager[None]:
        """Cap what is launched inside the context, replayed graphs included."""
        if self._sets:  # until vLLM captures, it profiles without graphs
            self.use(level)
        return self._backend.activate(level)

    def capture(self, stock_capture: Callable[[], int]) -> int:
        """Have vLLM capture (the runner's ``capture_model``) for each level; returns total bytes.

        Captures anew if there were sets already.

        Raises:
            RuntimeError: a level could not be captured, or not with the graphs of the others. No
                set is left then, and capturing is off: a forward with graphs stops with vLLM's
                error.
        """
        self.clear()
        total = 0
        for level in self._backend.levels:
            try:
                total += self._capture(level, stock_capture)
                self._sets[level] = _taken()
                self._compare(level)
            except BaseException as error:
                self.clear()
                # vLLM leaves it on where a capture fails.
                set_cudagraph_capturing_enabled(False)
                if not isinstance(error, Exception):
                    raise
                raise RuntimeError(f"no CUDA graphs for {level}: {error}") from error
        self.use(self._backend.levels[-1])
        ours = sum(len(graphs) for pairs in self._sets.values() for _, graphs in pairs)
        others = live_graphs() - ours
        if others > 0:
            logger.warning(
                "%d CUDA graphs are the model's own: they keep the SMs that they were captured"
                " with, whatever the level",
                others,
            )
        return total

    def use(self, level: Level) -> None:
        """Let forwards replay this level's graphs from now on. Cheap; nothing if it is in use.

        Raises:
            ValueError: nothing was captured for the level.
        """
        if level == self._in_use:
            return
        pairs = self._sets.get(level)
        if pairs is None:
            raise ValueError(f"{level} has no CUDA graphs; captured: {list(self._sets)}")
        for wrapper, graphs in pairs:
            wrapper.concrete_cudagraph_entries = graphs
        self._in_use = level

    def clear(self) -> None:
        """Drop all sets, as before the runner's ``shutdown``: vLLM drops only the one in use."""
        CUDAGraphWrapper.clear_all_graphs()
        self._sets.clear()
        self._in_use = None

    def _capture(self, level: Level, stock_capture: Callable[[], int]) -> int:
        surrounding = torch.cuda.current_stream()
        with self._backend.activate(level):
            if level.whole:
                # Its stream may be the default one, on which nothing can be captured; any side
                # stream of the primary context has the whole.
                return stock_capture()
            stream = torch.cuda.current_stream()
            if stream == surrounding:
                raise RuntimeError(f"{type(self._backend).__name__} gave it no stream of its own")
            with _graph_capture_on(stream):
                return stock_capture()

    def _compare(self, level: Level) -> None:
        first, last = (
            {wrapper: set(graphs) for wrapper, graphs in self._sets[each] if graphs}
            for each in (self._backend.levels[0], level)
        )
        if first != last:
            raise RuntimeError(f"other graphs than for {self._backend.levels[0]}")


def _taken() -> tuple[tuple[CUDAGraphWrapper, dict[Any, Any]], ...]:
    """What all wrappers of the process have captured, which they have no longer."""
    pairs = []
    for wrapper in list(CUDAGraphWrapper._all_instances):
        pairs.append((wrapper, wrapper.concrete_cudagraph_entries))
        wrapper.concrete_cudagraph_entries = {}
    return tuple(pairs)


@contextmanager
def _graph_capture_on(stream: Any) -> Iterator[None]:
    """vLLM's captures happen on ``stream``, not on a side stream of the primary context."""
    stock = parallel_state.graph_capture
    ours = functools.partial(
        stock, graph_capture_context=parallel_state.GraphCaptureContext(stream)
    )
    # vLLM-Omni imports it anew for talker_mtp; the runner has it by name.
    places = (parallel_state, gpu_model_runner)
    for place in places:
        place.graph_capture = ours
    try:
        yield
    finally:
        for place in places:
            place.graph_capture = stock
