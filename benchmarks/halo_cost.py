"""What HALO costs on top of vLLM's own scheduling, by requests that run.

    python benchmarks/halo_cost.py [--plot halo_cost.png]

The real scheduler classes with B = 384 and as many requests as given, each with one of the promises
of the hospital, a context of 1,024 tokens, and prompts that come as others end; asynchronous
scheduling has a step under way while it plans the next. Medians of the time outside of vLLM's own
methods: in ``schedule``, where iterations are planned, and in ``update_from_output``, where release
times are noted and the machine is learned; and vLLM's own time in both. An iteration of the paper's
takes 30 ms and more. Medians of 100 iterations, and of three rounds of all.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from rich.console import Console
from rich.table import Table

ROOT: Final = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "serving"))

from engine import make_request, make_scheduler, model_output, stop_clock  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.outputs import ModelRunnerOutput  # noqa: E402
from vllm.v1.request import RequestStatus  # noqa: E402

from horizonserve import instance  # noqa: E402
from horizonserve.serving.plain import HorizonAsyncScheduler, HorizonScheduler  # noqa: E402

BATCH_TOKENS: Final = 384
CONTEXT_TOKENS: Final = 1_024
ITERATION_S: Final = 0.040
RUNNING: Final = (64, 128, 256, 384, 512, 768, 1_024, 1_536, 2_000)
WARM, MEASURED = 30, 100
PROMISES: Final = ((2_000, 200), (2_000, 100), (1_000, 50), (1_000, 50))


class Timed(Scheduler):
    """Innermost: measures vLLM's own methods."""

    own_s = 0.0

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's."""
        start_s = time.perf_counter()
        output = super().schedule(*args, **kwargs)
        self.own_s = time.perf_counter() - start_s
        return output

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's."""
        start_s = time.perf_counter()
        outputs = super().update_from_output(*args, **kwargs)
        self.own_s = time.perf_counter() - start_s
        return outputs


class Measured(HorizonScheduler, Timed):
    """The product's classes around it."""


class MeasuredAsync(HorizonAsyncScheduler, Timed):
    """With asynchronous scheduling."""


CLASSES: Final = {"synchronous": Measured, "asynchronous": MeasuredAsync}


class Iteration(NamedTuple):
    """Seconds in ``schedule`` and in ``update_from_output`` outside of vLLM's own, and in those."""

    plan_s: float
    note_s: float
    own_s: float


class Engine:
    """A scheduler, and a worker that answers each step when the next is scheduled, or at once."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self._ahead = 1 if isinstance(scheduler, MeasuredAsync) else 0
        self._under_way: deque[tuple[Any, ModelRunnerOutput]] = deque()

    def iterate(self) -> Iteration:
        """One iteration."""
        scheduler = self.scheduler
        output, plan_s, own_s = self._timed(scheduler.schedule)
        self._under_way.append((output, model_output(scheduler, output)))
        scheduler.now_s[0] += ITERATION_S
        if len(self._under_way) <= self._ahead:
            return Iteration(plan_s, 0.0, own_s)
        _, note_s, more_s = self._timed(scheduler.update_from_output, *self._under_way.popleft())
        return Iteration(plan_s, note_s, own_s + more_s)

    def _timed(self, method: Callable[..., Any], *args: Any) -> tuple[Any, float, float]:
        """What it returns, and the time in it outside of vLLM's own and in that."""
        start_s = time.perf_counter()
        found = method(*args)
        own_s = self.scheduler.own_s
        return found, time.perf_counter() - start_s - own_s, own_s


def fill(cls: type, running: int) -> Engine:
    """A scheduler with so many requests in their answers."""
    slots = running + 8
    scheduler = make_scheduler(
        cls,
        slots=slots,
        token_budget=max(8_192, slots),
        blocks=slots * (CONTEXT_TOKENS // 16 + 40),
        additional_config={"horizon": {"scheduler": "default"}},
    )
    stop_clock(scheduler)
    for index in range(running):
        _add(scheduler, f"r{index}", index, CONTEXT_TOKENS)
    engine = Engine(scheduler)
    while len(scheduler.running) < running or any(
        not request.num_output_tokens for request in scheduler.running
    ):
        engine.iterate()
    changes = {"scheduler": "halo", "token_budget": BATCH_TOKENS, "slots": slots}
    scheduler._use(scheduler._settings.changed(changes))
    return engine


def _add(scheduler: Any, name: str, index: int, prompt_tokens: int) -> None:
    ttft_ms, tbt_ms = PROMISES[index % len(PROMISES)]
    hints = {"ttft_ms": ttft_ms, "tbt_ms": tbt_ms}
    scheduler.add_request(
        make_request(name, prompt_tokens=prompt_tokens, output_tokens=4_000, extra_args=hints)
    )


def cost(cls: type, running: int) -> Iteration:
    """Medians with so many requests that run."""
    engine = fill(cls, running)
    scheduler = engine.scheduler
    times = []
    for step in range(WARM + MEASURED):
        if step % 5 == 0 and len(scheduler.running) >= running:
            # One ends and one comes: prompts are computed beside the others.
            gone = scheduler.running[step % running].request_id
            scheduler.finish_requests([gone], RequestStatus.FINISHED_ABORTED)
            _add(scheduler, f"n{step}", step, 200)
        times.append(engine.iterate())
    scheduler.shutdown()
    return medians(times[WARM:])


def medians(some: Iterable[Iteration]) -> Iteration:
    """Of each time by itself."""
    return Iteration(*map(median, zip(*some, strict=True)))


def plot(path: Path, found: Mapping[tuple[str, int], Iteration]) -> None:
    """Cost by requests that run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    for color, name in zip(("C0", "C1"), CLASSES, strict=True):
        rows = [(running, it) for (one, running), it in found.items() if one == name]
        numbers = [running for running, _ in rows]
        plan_ms = [1e3 * it.plan_s for _, it in rows]
        both_ms = [1e3 * (it.plan_s + it.note_s) for _, it in rows]
        axes.plot(numbers, both_ms, color=color, marker="o", label=f"{name}, plan and notes")
        axes.plot(numbers, plan_ms, color=color, linestyle=":", label="the plan alone")
    axes.axhline(0.3, linestyle="--", color="grey", label="1% of 30 ms")
    axes.set(xlabel="running requests", ylabel="HALO, ms an iteration", ylim=0)
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Config, run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, nargs="+", default=RUNNING)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plot", type=Path)
    a = parser.parse_args()
    logging.disable(logging.WARNING)
    cells = [(name, running) for name in CLASSES for running in a.running]
    rounds = []
    with tempfile.TemporaryDirectory() as records:
        instance.DIRECTORY = Path(records)
        # The machine's speed changes from minute to minute, so a round has all of them.
        for _ in range(a.rounds):
            rounds.append({cell: cost(CLASSES[cell[0]], cell[1]) for cell in cells})
    found = {cell: medians(one[cell] for one in rounds) for cell in cells}
    columns = "scheduling", "running", "plan, ms", "notes, ms", "vLLM's own, ms"
    table = Table(*columns, title="measured on CPU engine")
    for (name, running), it in found.items():
        table.add_row(name, str(running), *(f"{1e3 * one_s:.3f}" for one_s in it))
    Console().print(table)
    if a.plot:
        plot(a.plot, found)


if __name__ == "__main__":
    main()
