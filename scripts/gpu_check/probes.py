"""What is measured without a framework; each probe is a function of its room."""

from __future__ import annotations

import contextlib
import importlib.metadata
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from gpu_check.child import NotTested, Room
from gpu_check.kernels import Kernels, PlainStreams, open_device
from horizonserve.spatial.driver import Device, bindings, call
from horizonserve.spatial.green import GreenBackend, Streams
from horizonserve.spatial.ladder import Level, Side, choose
from horizonserve.spatial.nvml import NvmlSource
from horizonserve.spatial.pressure import Sampler, SourceError

Figures = dict[str, Any]

#: A busy side of `corun` works for about so long alone.
BUSY_S: Final = 0.6
#: Activations between two synchronisations, which keeps the streams' queues from filling.
BATCH: Final = 100
NVML_S: Final = 5.0
LOAD_S: Final = 5.0
#: NVML's figure of a phase is settled after its longest sample period.
SETTLE_S: Final = 1.5
WINDOW_S: Final = 0.4
PACKAGES: Final = ("torch", "cuda-bindings", "nvidia-ml-py", "nvidia-cuda-nvrtc")


def identify(room: Room) -> Figures:
    """The device, its driver and the versions of what this check uses."""
    device = Device()
    name = call("cuDeviceGetName", 128, device.handle)
    return {
        "device": name.split(b"\0")[0].decode(),
        "uuid": device.nvml_uuid,
        "sms": device.die.total_sms,
        "compute_capability": list(device.compute_capability),
        "driver": _driver(),
        "driver_cuda": device.driver_version,
        "versions": {package: _version(package) for package in PACKAGES},
    }


def _driver() -> str | None:
    """The driver's own version, as nvidia-smi shows it."""
    try:
        import pynvml as nvml
    except ImportError:
        return None
    with contextlib.suppress(nvml.NVMLError):
        nvml.nvmlInit()
        try:
            return str(nvml.nvmlSystemGetDriverVersion())
        finally:
            nvml.nvmlShutdown()
    return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def levels(room: Room) -> Figures:
    """Every level of the die, by each way to split, seen while the other process looks too."""
    device = Device()
    room.meet("open")
    ways: dict[str, list[Level]] = {}
    for way in (False, True) if device.structured else (False,):
        device.structured = way
        ways["structured" if way else "count"] = list(device.levels())
    used = ways.get("structured", ways["count"])
    die = device.die
    return {
        "die": {
            "total_sms": die.total_sms,
            "minimum_sms": die.minimum_sms,
            "alignment_sms": die.alignment_sms,
        },
        "used": device.split_function,
        "ways": ways,
        "ladder": choose(die, used),
    }


def smid(room: Room) -> Figures:
    """The SMs that this side's work really ran on, per rung."""
    device = open_device()
    kernels = Kernels(device)
    streams = PlainStreams()
    side = Side(room.side)
    rungs = ladder(device)
    backend = GreenBackend(device, rungs, side, streams)
    seen = []
    for index, level in enumerate(rungs[:-1]):
        room.meet(f"level {index}")
        with backend.activate(level):
            sms = kernels.sms(streams.current)
        seen.append({"granted_sms": granted(level, side), "sms": sms})
    return {"mps": device.mps, "levels": seen}


def corun(room: Room) -> Figures:
    """Time of the same fixed work alone and beside the other process's, on the middle rung."""
    device = open_device()
    kernels = Kernels(device)
    streams = PlainStreams()
    side = Side(room.side)
    rungs = ladder(device)
    middle = min(rungs[:-1], key=lambda level: abs(level.shared_sms - level.downstream_sms))
    backend = GreenBackend(device, (middle,), side, streams)
    blocks = 4 * granted(middle, side)

    def work(launches: int, rounds: int) -> float:
        with backend.activate(middle):
            begin_s = time.perf_counter()
            for _ in range(launches):
                kernels.busy(streams.current, blocks, rounds)
            call("cuStreamSynchronize", streams.current)
            return time.perf_counter() - begin_s

    def alone() -> tuple[int, int, float]:
        # Twice: the first finds the clocks low. A launch then takes about 5 ms.
        rounds = 1 << 20
        for _ in range(2):
            work(2, rounds)
            rounds = max(1, int(rounds * 0.005 / (work(4, rounds) / 4)))
        launches = round(BUSY_S / 0.005)
        return launches, rounds, work(launches, rounds)

    room.meet("built")
    if side is Side.DOWNSTREAM:
        room.meet("shared done")
    launches, rounds, alone_s = alone()
    if side is Side.SHARED:
        room.meet("shared done")
    room.meet("both known")
    together_s = work(launches, rounds)
    return {
        "mps": device.mps,
        "granted_sms": granted(middle, side),
        "launches": launches,
        "alone_s": alone_s,
        "together_s": together_s,
    }


def switch(room: Room) -> Figures:
    """Cost of a context, and of entering and leaving a level without a framework."""
    return switching(open_device(), PlainStreams())


def switching(device: Device, streams: Streams) -> Figures:
    """The figures of `switch` with these streams; a context has to be current."""
    rungs = ladder(device)
    contexts = []
    backends = []  # what was made has to live while the next is measured
    for level in rungs[:-1]:
        before, _ = call("cuMemGetInfo")
        begin_s = time.perf_counter()
        backends.append(GreenBackend(device, (level,), Side.SHARED, streams))
        took_s = time.perf_counter() - begin_s
        after, _ = call("cuMemGetInfo")
        contexts.append(
            {"sms": level.shared_sms, "ms": 1e3 * took_s, "mib": (before - after) / 2**20}
        )
    backend = GreenBackend(device, rungs, Side.SHARED, streams)
    same_us, changed_us = [], []
    for batch in range(80):
        # A batch at one level, as forwards follow one another; then one of changes only.
        changing = batch % 2
        begin_s = time.perf_counter()
        for index in range(BATCH):
            with backend.activate(rungs[(index if changing else batch // 2) % (len(rungs) - 1)]):
                pass
        took_s = time.perf_counter() - begin_s
        # The last wait of each activation is on the surrounding stream.
        call("cuStreamSynchronize", 0)
        if batch >= 10:
            (changed_us if changing else same_us).append(1e6 * took_s / BATCH)
    return {
        "contexts": contexts,
        "activation_us": spread(same_us),
        "change_us": spread(changed_us),
    }


def nvml(room: Room) -> Figures:
    """How long a sample takes, and how far apart the driver's buffered samples are."""
    device = Device()
    asked_s: set[float] = set()

    def clock() -> float:
        now_s = time.monotonic()
        asked_s.add(now_s)
        return now_s

    source = NvmlSource(device.nvml_uuid, clock=clock)
    took_us, times_s = [], []
    until_s = time.monotonic() + NVML_S
    try:
        samples = source.sample()  # opens the library, and finds what the buffer holds
        while time.monotonic() < until_s:
            # One without a time has that of our clock, once a second whatever the driver does.
            times_s += [sample.at_s for sample in samples if sample.at_s not in asked_s]
            time.sleep(0.02)
            begin_s = time.perf_counter()
            samples = source.sample()
            took_us.append(1e6 * (time.perf_counter() - begin_s))
    finally:
        source.close()
    gaps_s = [later - earlier for earlier, later in zip(times_s, times_s[1:], strict=False)]
    return {
        "latency_us": spread(took_us),
        "timed_samples": len(times_s),
        "period_s": spread(gaps_s) if gaps_s else None,
    }


def nvml_load(room: Room) -> Figures:
    """Both NVML figures on an idle device and while copies fill its memory bandwidth."""
    device = open_device()
    name = device.nvml_uuid
    free, _ = call("cuMemGetInfo")
    size = min(1 << 30, free // 4)
    source, target = call("cuMemAlloc", size), call("cuMemAlloc", size)
    stream = call("cuStreamCreate", bindings().CUstream_flags.CU_STREAM_NON_BLOCKING)
    copied = 0

    def copies() -> None:
        nonlocal copied
        for _ in range(16):
            call("cuMemcpyDtoDAsync", target, source, size, stream)
        call("cuStreamSynchronize", stream)
        copied += 16 * size

    figures: Figures = {"utilisation": {}, "dram": {}}
    phases: dict[str, Callable[[], None]] = {"idle": lambda: time.sleep(0.05), "load": copies}
    for phase, work in phases.items():
        work()
        copied = 0
        begin_s = time.monotonic()
        with _watched(name, gpm=False) as rates, _watched(name, gpm=True) as bandwidths:
            while time.monotonic() - begin_s < LOAD_S:
                work()
        took_s = time.monotonic() - begin_s
        figures["utilisation"][phase] = rates.mean()
        figures["dram"][phase] = bandwidths.mean()
        if phase == "load":
            figures["copied_gb_s"] = 2 * copied / took_s / 1e9
    return figures


class _Watch(threading.Thread):
    """Looks at a source beside the work; ``mean`` is of what came after ``SETTLE_S``."""

    def __init__(self, source: NvmlSource) -> None:
        super().__init__(daemon=True)
        self._source = source
        self._values: list[float] = []
        self._reason = "no sample"
        self.stop = threading.Event()

    def run(self) -> None:
        begin_s = time.monotonic()
        try:
            while not self.stop.wait(0.05):
                found = [sample.value for sample in self._source.sample()]
                if time.monotonic() - begin_s > SETTLE_S:
                    self._values += found
        except SourceError as error:
            self._reason = str(error)
        self._source.close()

    def mean(self) -> float | str:
        """Of the values in [0, 1]; where there is none, why."""
        return statistics.fmean(self._values) if self._values else self._reason


@contextlib.contextmanager
def _watched(name: str, *, gpm: bool) -> Iterator[_Watch]:
    watch = _Watch(NvmlSource(name, gpm=gpm))
    watch.start()
    try:
        yield watch
    finally:
        watch.stop.set()
        watch.join(5)


def nvml_launch(room: Room) -> Figures:
    """Launches a second without and with a sampler at 10 Hz, in windows that take turns."""
    device = open_device()
    kernels = Kernels(device)
    stream = int(call("cuStreamCreate", bindings().CUstream_flags.CU_STREAM_NON_BLOCKING))
    sampler = Sampler(NvmlSource(device.nvml_uuid), period_s=0.1)
    # Opens the library; a source that fails would make both windows the same.
    sampler.look()
    time.sleep(1.2)
    sampler.look()
    if sampler.pressure(time.monotonic()) is None:
        raise NotTested("NVML has no figure here")
    looking, ended = threading.Event(), threading.Event()
    looks = 0

    def look() -> None:
        nonlocal looks
        while not ended.wait(0.1):
            if looking.is_set():
                sampler.look()
                looks += 1

    thread = threading.Thread(target=look, daemon=True)
    thread.start()

    def window() -> float:
        launches = 0
        begin_s = time.perf_counter()
        while time.perf_counter() - begin_s < WINDOW_S:
            for _ in range(BATCH):
                kernels.nothing(stream)
            call("cuStreamSynchronize", stream)
            launches += BATCH
        return launches / (time.perf_counter() - begin_s)

    window()
    rates: dict[str, list[float]] = {"without": [], "with": []}
    for _ in range(8):
        looking.clear()
        rates["without"].append(window())
        looking.set()
        rates["with"].append(window())
    ended.set()
    thread.join(5)
    sampler.close()
    return {"looks": looks, **{f"{key}_per_s": spread(rates[key]) for key in rates}}


def ladder(device: Device) -> tuple[Level, ...]:
    """The rungs a server would use, and the whole as the last.

    Raises:
        NotTested: the die has no level but the whole.
    """
    rungs = choose(device.die, device.levels())
    if len(rungs) < 2:
        raise NotTested(f"no level but the whole on {device.die}")
    return rungs


def granted(level: Level, side: Side) -> int:
    return level.shared_sms if side is Side.SHARED else level.downstream_sms


def spread(values: list[float]) -> dict[str, float]:
    """Median, the middle half and the extremes."""
    ordered = sorted(values)

    def at(share: float) -> float:
        return ordered[round(share * (len(ordered) - 1))]

    return {
        "min": ordered[0],
        "p25": at(0.25),
        "p50": statistics.median(ordered),
        "p75": at(0.75),
        "p99": at(0.99),
        "max": ordered[-1],
    }
