"""Spatial control on against off on the same traces, on one server, and its loop over time.

    python benchmarks/spatial.py --model DIR --deploy FILE --out DIR [--backend cores|dry-run]

With ``cores`` it caps CPU cores; ``dry-run`` caps nothing, but decides on the ladder of an H100.
The figures say nothing about a GPU. Start it again with the same --out to go on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rich.console import Console

from horizonserve.bench.boot import BOOT_GUESS_S, booted
from horizonserve.bench.calibrate import QUICK, calibrate
from horizonserve.bench.compare import Arm, Experiment, compare, stored_runs
from horizonserve.bench.display import Display
from horizonserve.bench.live import Live
from horizonserve.bench.play import Bounds
from horizonserve.bench.server import Server
from horizonserve.bench.spatial_trace import Recorder, correlation, load, plot, switches
from horizonserve.bench.store import Store
from horizonserve.bench.study import TimeIsUpError
from horizonserve.bench.summary import ratios, rows, to_csv
from horizonserve.bench.table import KIND, ratio_line, table
from horizonserve.workload import Mix

ARMS = tuple(
    Arm(
        f"spatial-{'on' if on else 'off'}",
        {"scheduler": "horizon", "spatial": on, "lending": False},
    )
    for on in (True, False)
)


async def measure(server: Server, store: Store, display: Display, a: argparse.Namespace) -> None:
    """Calibrate, then play what is missing."""
    until_s = time.monotonic() + a.time_limit_s
    mix = Mix.of_audio_share(a.audio_share)
    async with Live.open(server) as live:
        calibration, base = await calibrate(live, store, mix, display, slots=a.slots, effort=QUICK)
        record = live.record().identity["spatial"]["record"]

        def in_time(experiment: Experiment) -> None:
            if time.monotonic() + experiment.run_guess_s > until_s:
                raise TimeIsUpError("the time is up; start it again with the same --out to go on")

        def traced(name: str) -> AbstractContextManager[None]:
            return Recorder(record, trace_file(store, name))

        for load_factor in a.loads:
            experiment = Experiment(
                name=f"load-{load_factor:g}x",
                mix=mix,
                rate_rps=round(load_factor * calibration.saturation.rate_rps, 3),
                duration_s=a.duration_s,
                seeds=tuple(a.seeds),
                arms=ARMS if a.backend == "cores" else ARMS[:1],
                bounds=Bounds(drain_s=calibration.drain_s(60.0)),
            )
            try:
                await compare(
                    live,
                    store,
                    experiment,
                    base,
                    calibration.targets,
                    display,
                    before_run=in_time,
                    during_run=traced,
                )
            except TimeIsUpError as error:
                display.console.print(str(error))
                return
            finally:
                show(display.console, store, experiment, a.backend)


def trace_file(store: Store, name: str) -> Path:
    """Where the loop of a run is recorded."""
    return store.directory / f"{name}.trace.csv"


def show(console: Console, store: Store, experiment: Experiment, backend: str) -> None:
    """Print and write what there is of an experiment."""
    runs = stored_runs(store, experiment)
    if not runs:
        return
    name, rate = experiment.name, experiment.rate_rps
    of_experiment = rows(runs)
    console.print(table(of_experiment, f"{name}: {rate:.2f} requests/s, {backend}"))
    (store.directory / f"{name}.csv").write_text(to_csv(of_experiment), encoding="utf-8")
    if (ratio := ratios(runs, ARMS[0].name, ARMS[1].name)) is not None:
        console.print(ratio_line(ratio), highlight=False)
    loops: list[dict[str, Any]] = []
    for seed in experiment.seeds:
        run_name = experiment.run_name(seed, ARMS[0])
        if not store.path(run_name).exists():
            continue
        moments = load(trace_file(store, run_name))
        loops.append(
            {
                "kind": KIND,
                "backend": backend,
                "run": run_name,
                "moments": len(moments),
                "level_changes": switches(moments),
                "capped_share": sum(m.shared_sms < m.total_sms for m in moments) / len(moments),
                "correlation": correlation(moments, capped=False),
                "correlation_capped": correlation(moments, capped=True),
            }
        )
        console.print(loops[-1], highlight=False)
        plot(
            moments,
            trace_file(store, run_name).with_suffix(".png"),
            f"{run_name}, {backend}, {rate:.2f} requests/s ({KIND})",
        )
    (store.directory / f"{name}.loop.json").write_text(json.dumps(loops, indent=1))


def main() -> None:
    """Config, seeds, run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="made there if it is missing")
    parser.add_argument("--deploy", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--backend", default="cores", choices=("cores", "dry-run"))
    parser.add_argument("--b-sat", type=float, default=0.9)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.9, 1.3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--audio-share", type=float, default=0.4)
    parser.add_argument("--duration-s", type=float, default=120.0)
    parser.add_argument("--time-limit-s", type=float, default=3_600.0)
    a = parser.parse_args()
    env = {"HORIZON_SPATIAL_BACKEND": a.backend, "HORIZON_B_SAT": str(a.b_sat)}
    guess_s = len(a.loads) * len(a.seeds) * len(ARMS) * (a.duration_s + 30) + QUICK.guess_s
    with (
        Display(Console(), BOOT_GUESS_S + guess_s) as display,
        booted(a.model, a.deploy, a.out / "server.log", display, env=env) as server,
    ):
        asyncio.run(measure(server, Store(a.out), display, a))


if __name__ == "__main__":
    main()
