"""The demo: what the policies do to one mixed trace on the real server, in a few minutes.

    horizonserve demo --work DIR

It builds the `small` model if it is missing, starts the server once, measures each class alone,
sets every target from that, finds the saturation rate of the mix, and plays one seeded trace above
it: under the other policies at slot counts that a user would have to choose, and under `horizon`,
which needs none.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

from horizonserve.bench.boot import booted
from horizonserve.bench.calibrate import QUICK, Calibration, calibrate
from horizonserve.bench.compare import DRAIN_GUESS_S, SETTLE_GUESS_S, Arm, Experiment, compare
from horizonserve.bench.display import Display
from horizonserve.bench.live import Live
from horizonserve.bench.metrics import Promise
from horizonserve.bench.play import Bounds
from horizonserve.bench.store import Run, Store
from horizonserve.bench.summary import ALL, Row, ratios, rows, to_csv, to_json
from horizonserve.bench.table import KIND, ratio_line, table
from horizonserve.workload import Mix

SLOTS: Final = 4
MORE_SLOTS: Final = 16
SEED: Final = 1
#: Of saturation: the load at which order begins to matter (HorizonServe, figure 6).
LOAD: Final = 1.3
#: The server's stop and the tables, kept free at the end.
_RESERVE_S: Final = 20.0
_SHORTEST_S, _LONGEST_S = 40.0, 90.0
_DRAIN_LIMIT_S: Final = 60.0
HORIZON: Final = "horizon"
ARMS: Final = (
    Arm(f"default, {SLOTS} slots", {"scheduler": "default", "slots": SLOTS}),
    Arm(f"edf, {SLOTS} slots", {"scheduler": "edf", "slots": SLOTS}),
    Arm(f"default, {MORE_SLOTS} slots", {"scheduler": "default", "slots": MORE_SLOTS}),
    # The base has the slot count of the saturation; none means as many as the stage has.
    Arm(HORIZON, {"scheduler": HORIZON, "slots": None, "token_budget": None}),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the demo found, and where it wrote it."""

    rows: list[Row]
    verdict: str
    out: Path


def run(
    work_dir: Path,
    deploy: Path,
    out: Path,
    *,
    model_dir: Path | None = None,
    time_limit_s: float = 600.0,
    port: int | None = None,
    console: Console | None = None,
) -> Outcome:
    """Run the demo; on the way out, however it ends, the server is stopped.

    ``out`` receives the server's log, every request, and the tables as CSV and JSON. A repeated
    run measures everything anew.

    Raises:
        ServerError: the server did not start or died.
        LiveError: it did not do what was asked of it.
    """
    console = console or Console()
    began_s = time.monotonic()
    # A name per run: the demo is a measurement, not an experiment that goes on.
    out = out / time.strftime("%Y%m%d-%H%M%S")
    mix = Mix.of_audio_share(0.3)
    make, model_dir = model_dir is None, model_dir or work_dir / "models" / "qwen2.5-omni-small"
    with (
        Display(console, time_limit_s) as display,
        booted(model_dir, deploy, out / "server.log", display, make=make, port=port) as server,
    ):

        async def measure() -> tuple[Calibration, list[Run]]:
            async with Live.open(server) as live:
                return await _measure(live, out, mix, display, began_s + time_limit_s)

        calibration, runs = asyncio.run(measure())
    return _show(console, out, calibration, runs, time.monotonic() - began_s)


async def _measure(
    live: Live, out: Path, mix: Mix, display: Display, until_s: float
) -> tuple[Calibration, list[Run]]:
    store = Store(out)
    calibration, base = await calibrate(live, store, mix, display, slots=SLOTS, effort=QUICK)
    drain_s = calibration.drain_s(_DRAIN_LIMIT_S)
    left_s = until_s - time.monotonic() - _RESERVE_S
    # The runs share what is left; each also drains and settles.
    share_s = left_s / len(ARMS) - min(DRAIN_GUESS_S, drain_s) - SETTLE_GUESS_S
    duration_s = round(min(_LONGEST_S, max(_SHORTEST_S, share_s)))
    experiment = Experiment(
        name="demo",
        mix=mix,
        rate_rps=round(LOAD * calibration.saturation.rate_rps, 3),
        duration_s=duration_s,
        seeds=(SEED,),
        arms=ARMS,
        bounds=Bounds(drain_s=drain_s),
    )
    display.expect(display.done_s + len(ARMS) * experiment.run_guess_s)
    runs = await compare(live, store, experiment, base, calibration.targets, display)
    return calibration, runs


def _show(
    console: Console, out: Path, calibration: Calibration, runs: list[Run], took_s: float
) -> Outcome:
    all_rows = rows(runs)
    head = runs[0].head
    others = [arm.name for arm in ARMS if arm.name != HORIZON]
    against = [r for over in others if (r := ratios(runs, HORIZON, over, Promise.BOTH))]
    title = (
        f"30% audio, {head['rate_rps']:.2f} requests/s"
        f" ({LOAD:g}x saturation), {head['duration_s']:.0f} s, one seed"
    )
    console.print(calibration.line(), highlight=False)
    console.print(table(all_rows, title))
    for one in against:
        console.print(ratio_line(one), highlight=False)
    says = verdict(all_rows)
    console.print(says, style="bold")
    busy = max((run.end.get("other_cores") or 0.0 for run in runs), default=0.0)
    if busy > 0.2:
        console.print(f"Note: other programs used up to {busy:.1f} cores during the runs.")
    facts = {"kind": KIND, "title": title, "verdict": says, **calibration.to_json()}
    (out / "demo.csv").write_text(to_csv(all_rows), encoding="utf-8")
    (out / "demo.json").write_text(to_json(all_rows, against, facts), encoding="utf-8")
    console.print(f"[dim]{took_s:.0f} s in all; every request is in {out}[/dim]")
    return Outcome(all_rows, says, out)


def verdict(all_rows: Sequence[Row]) -> str:
    """One line: `horizon` against the best of the others, both promises counted."""
    whole = {row.arm: row for row in all_rows if row.request_class == ALL}
    horizon = whole.pop(HORIZON)
    best = max(whole.values(), key=lambda row: row.both or 0.0)
    figures = f"{horizon.both or 0.0:.2f} of all promises against {best.both or 0.0:.2f}"
    if horizon.both_low > (best.both or 0.0):
        return f"horizon, with no slot count to set, keeps {figures} of {best.arm}."
    if best.both_low > (horizon.both or 0.0):
        return f"{best.arm} does better here: horizon keeps {figures}."
    return f"horizon keeps {figures} of {best.arm}: within the uncertainty of one run."
