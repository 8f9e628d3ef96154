"""PyTorch behind the seam of the green backend."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any


class TorchStreams:
    """Launches PyTorch's work on streams that are the driver's own."""

    def __init__(self, device_index: int) -> None:
        """Takes the device by its number among the visible ones."""
        import torch

        self._cuda = torch.cuda
        self._device = device_index
        self._last: Any = None

    def wrap(self, pointer: int) -> Any:
        """A torch stream around the driver's; it does not own it."""
        return self._cuda.ExternalStream(pointer, device=self._device)

    def current(self) -> int:
        """The handle of the stream that is launched on."""
        return int(self._cuda.current_stream(self._device).cuda_stream)

    def on(self, stream: Any) -> AbstractContextManager[None]:
        """Launch on the stream inside the context, also while a graph is captured.

        Unlike `use` it leaves freed memory alone, and orders nothing either.
        """
        return self._cuda.stream(stream)  # type: ignore[no-any-return]

    def use(self, stream: Any) -> AbstractContextManager[int]:
        """Launch on the stream inside the context; gives the surrounding stream's handle."""
        if stream is not self._last:
            # Torch keeps freed memory by stream: each level would come to hold a peak of its own,
            # which vLLM did not count, and which no other process could have.
            self._cuda.empty_cache()
            self._last = stream
        return _Use(self._cuda, self._device, stream)


class _Use:
    __slots__ = ("_context", "_cuda", "_device")

    def __init__(self, cuda: Any, device: int, stream: Any) -> None:
        self._cuda, self._device = cuda, device
        self._context = cuda.stream(stream)

    def __enter__(self) -> int:
        surrounding = int(self._cuda.current_stream(self._device).cuda_stream)
        self._context.__enter__()
        return surrounding

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._context.__exit__(kind, error, trace)
