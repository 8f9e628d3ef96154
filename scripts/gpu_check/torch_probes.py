"""What is measured with torch: activation of levels, stages beside each other, CUDA graphs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from gpu_check.child import NotTested, Room
from gpu_check.probes import Figures, granted, ladder, spread, switching
from horizonserve.spatial.driver import Device
from horizonserve.spatial.green import GreenBackend
from horizonserve.spatial.ladder import Level, Side
from horizonserve.spatial.torch_streams import TorchStreams

#: Time that each configuration of `interference` is watched, after WARM_S.
WATCH_S: Final = 4.0
WARM_S: Final = 0.5
#: Between two arrivals of short work.
ARRIVAL_S: Final = 0.2
WIDTH: Final = 8192
#: Weights that one decode step reads: those of a model of 4 billion parameters in 16 bit.
WEIGHTS_BYTES: Final = 8 << 30
DECODE_BATCH: Final = 8
#: Short work: the tokens of one prompt through so many layers.
PROMPT_TOKENS: Final = 1024
PROMPT_LAYERS: Final = 16
#: Of the downstream stage's matrices, and of the work that is captured.
DOWNSTREAM_WIDTH: Final = 4096


def opened() -> tuple[Any, Device]:
    """torch and the device, the primary context made by torch and current.

    Raises:
        NotTested: no torch, or it sees no GPU.
    """
    try:
        import torch
    except ImportError as error:
        raise NotTested(f"torch is not usable: {error}") from error
    if not torch.cuda.is_available():
        raise NotTested(f"torch {torch.__version__} sees no CUDA device")
    torch.cuda.set_device(0)
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    return torch, Device()


def switch_torch(room: Room) -> Figures:
    """The figures of `switch`, with torch's streams."""
    _, device = opened()
    return switching(device, TorchStreams(0))


def interference(room: Room) -> Figures:
    """A decode-like stage with bursts of short work beside a diffusion-like one.

    Each configuration is a rung for both sides, or "alone" or "uncapped": no cap at all, with the
    downstream side idle or not.
    """
    torch, device = opened()
    side = Side(room.side)
    rungs = ladder(device)
    backend = GreenBackend(device, rungs, side, TorchStreams(0))
    # The shared side first: both look at how much memory is free.
    if side is Side.DOWNSTREAM:
        room.meet("shared has memory")
    stage = _Shared(torch) if side is Side.SHARED else _Downstream(torch)
    if side is Side.SHARED:
        room.meet("shared has memory")
    for level in rungs:
        with backend.activate(level):
            stage.watch(0.0)
    configurations = [("alone", rungs[-1])]
    configurations += [(f"{level.shared_sms}", level) for level in rungs[:-1]]
    configurations += [("uncapped", rungs[-1])]
    figures: Figures = {"mps": device.mps, "configurations": {}}
    for name, level in configurations:
        room.meet(f"{name} begins")
        found: Figures = {}
        if side is Side.SHARED or name != "alone":
            with backend.activate(level):
                stage.watch(WARM_S)
                found = stage.watch(WATCH_S)
                if side is Side.DOWNSTREAM:
                    # The shared side's last step must not be faster for want of a neighbour.
                    stage.watch(WARM_S)
        sms = level.shared_sms if level.whole else granted(level, side)
        figures["configurations"][name] = {"granted_sms": sms, **found}
        room.meet(f"{name} ends")
    return figures


class _Shared:
    """Decode steps without a pause; short work, when it has arrived, goes before the next."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._sync: Callable[[], None] = lambda: torch.cuda.current_stream().synchronize()
        layer_bytes = 2 * WIDTH * WIDTH
        free, _ = torch.cuda.mem_get_info()
        count = max(2, min(WEIGHTS_BYTES, free // 4) // layer_bytes)
        kind = {"device": "cuda", "dtype": torch.bfloat16}
        self._weights = [torch.randn(WIDTH, WIDTH, **kind) for _ in range(count)]
        self._step_bytes = count * layer_bytes
        self._decode = [torch.randn(DECODE_BATCH, WIDTH, **kind) for _ in range(2)]
        self._prompt = [torch.randn(PROMPT_TOKENS, WIDTH, **kind) for _ in range(2)]
        torch.cuda.synchronize()

    def _layers(self, rows: list[Any], count: int) -> None:
        source, target = rows
        for weight in self._weights[:count]:
            self._torch.matmul(source, weight, out=target)
        self._sync()

    def watch(self, watch_s: float) -> Figures:
        """At least one decode step and one burst; then on for ``watch_s`` seconds."""
        steps_ms: list[float] = []
        first_ms: list[float] = []
        begin_s = now_s = time.perf_counter()
        due_s = begin_s
        while now_s - begin_s < watch_s or not (steps_ms and first_ms):
            if now_s >= due_s:
                self._layers(self._prompt, PROMPT_LAYERS)
                first_ms.append(1e3 * (time.perf_counter() - due_s))
                due_s += ARRIVAL_S
            else:
                self._layers(self._decode, len(self._weights))
                steps_ms.append(1e3 * (time.perf_counter() - now_s))
            now_s = time.perf_counter()
        tpot = spread(steps_ms)
        return {
            "tpot_ms": tpot,
            "ttft_ms": spread(first_ms),
            "decode_gb_s": self._step_bytes / tpot["p50"] / 1e6,
        }


class _Downstream:
    """Blocks of large matrix products with an elementwise pass over their result."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        kind = {"device": "cuda", "dtype": torch.bfloat16}
        width = DOWNSTREAM_WIDTH
        self._rows = torch.randn(2 * width, width, **kind)
        self._weight = torch.randn(width, width, **kind)
        self._result = torch.empty(2 * width, width, **kind)
        torch.cuda.synchronize()

    def watch(self, watch_s: float) -> Figures:
        """Work for ``watch_s`` seconds, or one round of 4 blocks."""
        torch = self._torch
        blocks = 0
        begin_s = time.perf_counter()
        while True:
            for _ in range(4):
                torch.matmul(self._rows, self._weight, out=self._result)
                torch.sigmoid(self._result, out=self._result)
                torch.add(self._result, self._rows, out=self._result)
            torch.cuda.current_stream().synchronize()
            blocks += 4
            took_s = time.perf_counter() - begin_s
            if took_s >= watch_s:
                return {"blocks_per_s": blocks / took_s}


def graphs(room: Room) -> Figures:
    """Time of one piece of work on the lowest and highest rung: eager, and as graphs of both."""
    torch, device = opened()
    rungs = ladder(device)
    if len(rungs) < 3:
        raise NotTested("the die has one rung only")
    pair = {"low": rungs[0], "high": rungs[-2]}
    backend = GreenBackend(device, rungs, Side.SHARED, TorchStreams(0))
    kind = {"device": "cuda", "dtype": torch.bfloat16}
    width = DOWNSTREAM_WIDTH
    one, other, result = (torch.randn(width, width, **kind) for _ in range(3))
    torch.cuda.synchronize()

    def work() -> None:
        for _ in range(4):
            torch.matmul(one, other, out=result)

    def median_ms(level: Level, run: Callable[[], None]) -> float:
        times = []
        with backend.activate(level):
            for _ in range(13):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                run()
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end))
        return spread(times[3:])["p50"]

    figures: Figures = {"sms": {name: level.shared_sms for name, level in pair.items()}}
    # Also warms what may not be made during a capture: handles and workspaces per stream.
    figures["eager_ms"] = {name: median_ms(level, work) for name, level in pair.items()}
    captured = {}
    for name, level in pair.items():
        captured[name] = torch.cuda.CUDAGraph()
        with (
            backend.activate(level),
            torch.cuda.graph(captured[name], stream=torch.cuda.current_stream()),
        ):
            work()
    torch.cuda.synchronize()
    figures["replay_ms"] = {
        f"{of} on {on}": median_ms(level, graph.replay)
        for of, graph in captured.items()
        for on, level in pair.items()
    }
    return figures
