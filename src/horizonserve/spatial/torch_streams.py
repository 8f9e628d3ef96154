"""torch as the framework that launches work; imported when the first backend is built."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any


class TorchStreams:
    """The Streams of a GreenBackend whose work torch launches.

    ``device_index`` is torch's number of the device, for ``wrap``. The device has to be torch's
    current one where work is launched.
    """

    def __init__(self, device_index: int) -> None:
        import torch

        self._cuda = torch.cuda
        self._device = device_index

    def wrap(self, pointer: int) -> Any:
        """A torch.cuda.ExternalStream; the handle has to outlive it."""
        return self._cuda.ExternalStream(pointer, device=self._device)

    def use(self, stream: Any) -> AbstractContextManager[int]:
        """Launch on ``stream`` inside the context; gives the handle of the surrounding stream."""
        return _Use(self._cuda, stream)


class _Use:
    """A class, as a generator context costs more than the switch."""

    __slots__ = ("_context", "_cuda")

    def __init__(self, cuda: Any, stream: Any) -> None:
        self._cuda = cuda
        self._context = cuda.stream(stream)

    def __enter__(self) -> int:
        surrounding: int = self._cuda.current_stream().cuda_stream
        self._context.__enter__()
        return surrounding

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._context.__exit__(kind, error, trace)
