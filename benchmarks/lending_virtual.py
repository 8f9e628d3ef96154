"""The ablation of the lending study on a virtual clock, where there is time for many seeds.

    python benchmarks/lending_virtual.py --out DIR

*Simulated*: the real scheduler classes and a machine of known prices (tests/serving/virtual.py).
Every run is stored as it ends; start it again with the same --out to go on.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "serving"))

from engine import make_scheduler, stop_clock  # noqa: E402
from virtual import AUDIO_S, PROMISES, TARGETS, Virtual  # noqa: E402

from horizonserve import instance  # noqa: E402
from horizonserve.bench.compare import Arm, Experiment  # noqa: E402
from horizonserve.bench.lending_study import ARMS, COUNTED, HORIZON, LendingConfig  # noqa: E402
from horizonserve.bench.play import Bounds  # noqa: E402
from horizonserve.bench.store import Run, Store  # noqa: E402
from horizonserve.bench.study import slots_arm  # noqa: E402
from horizonserve.bench.summary import ratios, rows  # noqa: E402
from horizonserve.bench.table import ratio_line, table  # noqa: E402
from horizonserve.serving.schedulers import HorizonARScheduler  # noqa: E402
from horizonserve.workload import make_trace  # noqa: E402

SLOTS = 96
#: How much the price of a step varies (standard deviation of its logarithm).
NOISE = 0.07
BASELINES = [slots_arm(policy, slots) for policy in ("default", "edf") for slots in (8, 16, 32)]


def play(store: Store, experiment: Experiment, seed: int, arm: Arm) -> None:
    """One run, unless it is there."""
    name, head = experiment.run_name(seed, arm), experiment.head(seed, arm, TARGETS)
    if store.done(name, head):
        return
    logging.disable(logging.WARNING)
    settings = PROMISES | {name: value for name, value in arm.changes.items() if value is not None}
    with tempfile.TemporaryDirectory() as records:
        instance.DIRECTORY = Path(records)
        scheduler = make_scheduler(
            HorizonARScheduler,
            slots=SLOTS,
            token_budget=4_096,
            blocks=12_000,
            additional_config={"horizon": settings},
        )
        stop_clock(scheduler)
        run = Virtual(scheduler, noise=NOISE, seed=seed)
        trace = make_trace(experiment.mix, experiment.rate_rps, experiment.duration_s, seed)
        run.play(trace, until_s=experiment.duration_s + experiment.bounds.drain_s)
        scheduler.shutdown()
    longest = {"wait_s": run.longest_wait_s(), "pause_s": run.longest_pause_s()}
    with store.writing(name, head, longest) as writer:
        for result in run.results():
            writer.result(result)


def show(console: Console, experiment: Experiment, runs: list[Run]) -> None:
    """The table, and what `horizon` is over each other arm on the same traces."""
    console.print(table(rows(runs), f"{experiment.rate_rps:g} requests/s", "simulated"))
    for promise in COUNTED:
        for arm in experiment.arms:
            if arm.name != HORIZON and (one := ratios(runs, HORIZON, arm.name, promise)):
                console.print(ratio_line(one), highlight=False)
    for arm in experiment.arms:
        wait_s, pause_s = (
            max(run.end[name] for run in runs if run.head["arm"] == arm.name)
            for name in ("wait_s", "pause_s")
        )
        console.print(f"{arm.name}: longest wait {wait_s:.1f} s, longest pause {pause_s:.1f} s")


def main() -> None:
    """Config, seeds, run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.8, 1.3, 1.6, 2.2])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(1, 9)))
    parser.add_argument("--duration-s", type=float, default=120.0)
    a = parser.parse_args()
    store, console = Store(a.out), Console()
    experiments = [
        Experiment(
            name=f"rate-{rate:g}",
            mix=LendingConfig().mix,
            rate_rps=rate,
            duration_s=a.duration_s,
            seeds=tuple(a.seeds),
            arms=(*BASELINES, *ARMS),
            # As long as the longest target: every request is decided.
            bounds=Bounds(drain_s=AUDIO_S),
        )
        for rate in a.rates
    ]
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        for experiment in experiments:
            each = list(experiment.runs())
            played = [pool.submit(play, store, experiment, seed, arm) for seed, arm in each]
            for one in played:
                one.result()
            runs = [store.load(experiment.run_name(seed, arm)) for seed, arm in each]
            show(console, experiment, runs)


if __name__ == "__main__":
    main()
