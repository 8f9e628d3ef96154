"""What HALO costs on top of vLLM's own scheduling, by requests that run.

    python benchmarks/halo_cost.py [--plot halo_cost.png]

The real scheduler class with B = 384 and as many requests as given, each with one of the promises
of the hospital, a context of 1,024 tokens, and prompts that come as others end. Medians: the plan
and its leases in an iteration (time in ``schedule`` outside of vLLM's own), and
``update_from_output`` per token, where release times are added. HALO's iterations take 30 ms and
more.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from rich.console import Console
from rich.table import Table

ROOT: Final = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "serving"))

from engine import make_request, make_scheduler, stop_clock  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.outputs import ModelRunnerOutput  # noqa: E402

from horizonserve import instance  # noqa: E402
from horizonserve.serving.plain import HorizonScheduler  # noqa: E402

BATCH_TOKENS: Final = 384
CONTEXT_TOKENS: Final = 1_024
ITERATION_S: Final = 0.040
RUNNING: Final = (64, 128, 256, 384, 512, 768, 1_024, 1_536, 2_000)
WARM, MEASURED = 30, 100
PROMISES: Final = ((2_000, 200), (2_000, 100), (1_000, 50), (1_000, 50))


class Timed(Scheduler):
    """Innermost: counts the time in vLLM's own ``schedule``."""

    own_s = 0.0

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        start_s = time.perf_counter()
        try:
            return super().schedule(*args, **kwargs)
        finally:
            self.own_s = time.perf_counter() - start_s


class Measured(HorizonScheduler, Timed):
    """The product's class around it."""


def iterate(scheduler: Any) -> tuple[float, float, int]:
    """One iteration: seconds around vLLM's own schedule and in the update; who computed."""
    start_s = time.perf_counter()
    output = scheduler.schedule()
    around_s = time.perf_counter() - start_s - scheduler.own_s
    names = list(output.num_scheduled_tokens)
    sampled = [
        [7] if (r := scheduler.requests[name]).num_computed_tokens >= r.num_tokens else []
        for name in names
    ]
    scheduler.now_s[0] += ITERATION_S
    made = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, sampled)
    start_s = time.perf_counter()
    scheduler.update_from_output(output, made)
    return around_s, time.perf_counter() - start_s, len(names)


def fill(running: int, policy: str) -> Any:
    """A scheduler with so many requests in their answers."""
    slots = running + 8
    scheduler = make_scheduler(
        Measured,
        slots=slots,
        token_budget=max(8_192, slots),
        blocks=slots * (CONTEXT_TOKENS // 16 + 40),
        additional_config={"horizon": {"scheduler": "default"}},
    )
    stop_clock(scheduler)
    for index in range(running):
        _add(scheduler, f"r{index}", index, CONTEXT_TOKENS)
    while len(scheduler.running) < running or any(
        not request.num_output_tokens for request in scheduler.running
    ):
        iterate(scheduler)
    changes = {"scheduler": policy, "token_budget": BATCH_TOKENS, "slots": slots}
    scheduler._use(scheduler._settings.changed(changes))
    return scheduler


def _add(scheduler: Any, name: str, index: int, prompt_tokens: int) -> None:
    ttft_ms, tbt_ms = PROMISES[index % len(PROMISES)]
    hints = {"ttft_ms": ttft_ms, "tbt_ms": tbt_ms}
    scheduler.add_request(
        make_request(name, prompt_tokens=prompt_tokens, output_tokens=4_000, extra_args=hints)
    )


def cost(running: int) -> tuple[float, float, float]:
    """Medians in ms: around ``schedule``, update under HALO, update of the stock policy."""
    found = {}
    for policy in ("halo", "default"):
        scheduler = fill(running, policy)
        times = []
        for step in range(WARM + MEASURED):
            if step % 5 == 0 and len(scheduler.running) >= running:
                # One ends and one comes: prompts are computed beside the others.
                gone = scheduler.running[step % running].request_id
                scheduler.finish_requests([gone], _aborted())
                _add(scheduler, f"n{step}", step, 200)
            times.append(iterate(scheduler))
        some = times[WARM:]
        found[policy] = median(t[0] for t in some), median(t[1] / t[2] for t in some)
        scheduler.shutdown()
    around_s = found["halo"][0]
    return 1e3 * around_s, 1e6 * found["halo"][1], 1e6 * found["default"][1]


def _aborted() -> Any:
    from vllm.v1.request import RequestStatus

    return RequestStatus.FINISHED_ABORTED


def plot(path: Path, rows: Sequence[tuple[int, float]]) -> None:
    """Cost of the plan by requests that run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot([n for n, _ in rows], [ms for _, ms in rows], marker="o")
    axes.axhline(0.3, linestyle="--", color="grey", label="1% of 30 ms")
    axes.set(xlabel="running requests", ylabel="HALO's plan, ms", ylim=0)
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Config, run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, nargs="+", default=RUNNING)
    parser.add_argument("--plot", type=Path)
    a = parser.parse_args()
    logging.disable(logging.WARNING)
    table = Table("running", "plan, ms", "us per token that comes in: HALO", "stock")
    rows = []
    with tempfile.TemporaryDirectory() as records:
        instance.DIRECTORY = Path(records)
        for running in a.running:
            around_ms, halo_us, stock_us = cost(running)
            rows.append((running, around_ms))
            table.add_row(str(running), f"{around_ms:.3f}", f"{halo_us:.2f}", f"{stock_us:.2f}")
    Console().print(table)
    if a.plot:
        plot(a.plot, rows)


if __name__ == "__main__":
    main()
