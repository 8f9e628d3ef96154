"""What torch and vLLM's kernels have of CUDA, on the CPU: for code that runs over the fake driver.

Launches run at once, where they are made. The time of a graph is made up: ``time_ms`` is asked for
it, with how many launches went to streams of the driver's own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from vllm.platforms import current_platform

current = [0]
forked = [0]


class Streams:
    """In the place of `TorchStreams`, which would want a real GPU."""

    def __init__(self, device_index: int) -> None: ...

    def wrap(self, pointer: int) -> int:
        return pointer

    def current(self) -> int:
        return current[0]

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        surrounding, current[0] = current[0], stream
        forked[0] += 1
        yield
        current[0] = surrounding


class OnCpu(TorchFunctionMode):
    """Tensors on "cuda" are on the CPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


class Punica:
    """vLLM's kernels by their definition; a token without an adapter is passed over."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.token_mapping_meta = SimpleNamespace(prepare_tensors=self._assign)

    def _assign(self, slots: torch.Tensor) -> None:
        self._slots = slots.tolist()

    def add_shrink(
        self, shrunk: torch.Tensor, x: torch.Tensor, lora_a: Sequence[torch.Tensor], scale: float
    ) -> None:
        for part, stack in enumerate(lora_a):
            for token, slot in enumerate(self._slots):
                if slot >= 0:
                    shrunk[part, token] = scale * (stack[slot, 0].float() @ x[token].float())

    def add_expand(
        self,
        rows: torch.Tensor,
        shrunk: torch.Tensor,
        lora_b: Sequence[torch.Tensor],
        slices: Sequence[int],
        add_inputs: bool,
    ) -> None:
        assert add_inputs
        start = 0
        for part, (stack, outputs) in enumerate(zip(lora_b, slices, strict=True)):
            for token, slot in enumerate(self._slots):
                if slot >= 0:
                    delta = stack[slot, 0].float() @ shrunk[part, token]
                    rows[token, start : start + outputs] += delta.to(rows.dtype)
            start += outputs


class Graph:
    """A captured graph: what was launched has run, and a replay gives the same again."""

    def __init__(self) -> None:
        self.forks = 0

    def replay(self) -> None:
        replayed[0] = self


replayed: list[Graph | None] = [None]


class Stream:
    cuda_stream = 0

    def wait_stream(self, other: Any) -> None: ...


@contextmanager
def _nothing(_: Any) -> Iterator[None]:
    yield


@contextmanager
def _capture(graph: Graph) -> Iterator[None]:
    before = forked[0]
    yield
    graph.forks = forked[0] - before


def install(time_ms: Callable[[int], float]) -> None:
    """Put it in place, for the rest of the process."""

    class Event:
        def __init__(self, enable_timing: bool = False) -> None: ...

        def record(self, stream: Any = None) -> None: ...

        def wait(self, stream: Any = None) -> None: ...

        def elapsed_time(self, end: Any) -> float:
            assert replayed[0] is not None
            return time_ms(replayed[0].forks)

    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.set_device = lambda _: None
    cuda.synchronize = lambda: None
    cuda.get_device_properties = lambda _: SimpleNamespace(L2_cache_size=1 << 12)
    cuda.current_stream = lambda *_: Stream()
    cuda.Stream, cuda.Event, cuda.CUDAGraph = Stream, Event, Graph
    cuda.stream, cuda.graph = _nothing, _capture
    sys.modules["vllm.lora.punica_wrapper.punica_gpu"] = SimpleNamespace(  # type: ignore[assignment]
        PunicaWrapperGPU=Punica
    )
    current_platform.is_cuda_alike = lambda: True
    OnCpu().__enter__()
