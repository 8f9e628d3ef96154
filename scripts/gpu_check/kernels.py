"""The few kernels of the check, compiled for the device at hand, and how they are launched."""

from __future__ import annotations

import ctypes
import importlib
from types import TracebackType
from typing import Any, Final

from gpu_check.child import NotTested
from horizonserve.spatial.driver import Device, bindings, call, resolved

#: Room for SM numbers; the last entry takes those above, which no device has today.
MOST_SMS: Final = 1024

SOURCE: Final = rb"""
extern "C" __global__ void smid(unsigned *seen, unsigned room, long long cycles) {
    unsigned sm;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    /* Long enough that the blocks launched together need every SM. */
    long long from = clock64();
    while (clock64() - from < cycles) { }
    if (threadIdx.x == 0) atomicAdd(&seen[sm < room ? sm : room - 1], 1u);
}
/* Fixed work, not fixed time: a clock would go on while the other process has its turn. */
extern "C" __global__ void busy(float *out, unsigned rounds) {
    float x = (float)threadIdx.x;
    for (unsigned i = 0; i < rounds; ++i) x = x * 0.999f + 0.5f;
    if (x < 0.0f) out[0] = x;
}
extern "C" __global__ void nothing(unsigned unused) { }
"""


def compiled(source: bytes, compute_capability: tuple[int, int]) -> bytes:
    """The machine code of ``source``, with the compiler of the CUDA toolkit.

    Raises:
        NotTested: no compiler, or it refuses the source or the device.
    """
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    except ImportError as error:
        raise NotTested(f"no cuda.bindings.nvrtc ({error})") from error

    def checked(function: str, *arguments: Any) -> Any:
        try:
            code, *results = getattr(nvrtc, function)(*arguments)
        except Exception as error:  # no libnvrtc
            raise NotTested(f"{function}: {type(error).__name__}: {error}") from error
        if int(code):
            raise NotTested(f"{function}: {getattr(code, 'name', code)}")
        return results[0] if results else None

    program = checked("nvrtcCreateProgram", source, b"gpu_check.cu", 0, [], [])
    architecture = "sm_{}{}".format(*compute_capability)
    options = [f"--gpu-architecture={architecture}".encode()]
    try:
        checked("nvrtcCompileProgram", program, len(options), options)
    except NotTested as error:
        log = bytearray(checked("nvrtcGetProgramLogSize", program))
        text = bytes(log)
        checked("nvrtcGetProgramLog", program, text)
        said = text.rstrip(b"\0").decode(errors="replace")
        raise NotTested(f"{error} for {architecture}: {said}") from error
    code = bytes(checked("nvrtcGetCUBINSize", program))
    checked("nvrtcGetCUBIN", program, code)
    return code


class PlainStreams:
    """The Streams of a backend without a framework: ``current`` is where to launch."""

    def __init__(self) -> None:
        self.current = 0

    def wrap(self, pointer: int) -> int:
        return pointer

    def use(self, stream: int) -> _Use:
        return _Use(self, stream)


class _Use:
    __slots__ = ("_stream", "_streams", "_surrounding")

    def __init__(self, streams: PlainStreams, stream: int) -> None:
        self._streams, self._stream = streams, stream

    def __enter__(self) -> int:
        self._surrounding, self._streams.current = self._streams.current, self._stream
        return self._surrounding

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._streams.current = self._surrounding


def open_device() -> Device:
    """The first visible device, its primary context current in this thread."""
    device = Device()
    call("cuCtxPushCurrent", call("cuDevicePrimaryCtxRetain", device.handle))
    return device


class Kernels:
    """The kernels on one device, whose primary context is current."""

    def __init__(self, device: Device) -> None:
        code = compiled(SOURCE, device.compute_capability)
        # A library belongs to no context: its kernels run in that of the stream.
        self._library = call("cuLibraryLoadData", code, [], [], 0, [], [], 0)
        self._launch = resolved("cuLaunchKernel")
        self._smid, self._busy, self._nothing = (
            bindings().CUfunction(int(call("cuLibraryGetKernel", self._library, name)))
            for name in (b"smid", b"busy", b"nothing")
        )
        self._seen = call("cuMemAlloc", 4 * MOST_SMS)
        self._total_sms = device.die.total_sms

    def sms(self, stream: int) -> list[int]:
        """The numbers of the SMs that work on this stream really uses, ascending."""
        call("cuMemsetD8Async", self._seen, 0, 4 * MOST_SMS, stream)
        values = (int(self._seen), MOST_SMS, 20_000)
        types = (ctypes.c_void_p, ctypes.c_uint, ctypes.c_longlong)
        # 64 blocks an SM of the whole device: several rounds wherever it runs.
        self._launch(
            self._smid, 64 * self._total_sms, 1, 1, 64, 1, 1, 0, stream, (values, types), 0
        )
        call("cuStreamSynchronize", stream)
        counts = (ctypes.c_uint * MOST_SMS)()
        call("cuMemcpyDtoH", ctypes.addressof(counts), self._seen, ctypes.sizeof(counts))
        return [sm for sm, blocks in enumerate(counts) if blocks]

    def busy(self, stream: int, blocks: int, rounds: int) -> None:
        """Launch ``blocks`` blocks of ``rounds`` multiplications."""
        parameters = ((int(self._seen), rounds), (ctypes.c_void_p, ctypes.c_uint))
        self._launch(self._busy, blocks, 1, 1, 256, 1, 1, 0, stream, parameters, 0)

    def nothing(self, stream: int) -> None:
        """Launch one block that does nothing."""
        self._launch(self._nothing, 1, 1, 1, 32, 1, 1, 0, stream, ((0,), (ctypes.c_uint,)), 0)
