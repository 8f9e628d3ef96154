"""Who ran and who lent its place in the slots of the shared stage, from a step log.

    python benchmarks/lending_picture.py --model DIR --deploy FILE --work DIR --out slots.png
    python benchmarks/lending_picture.py --log steps-PID.jsonl --out slots.png

The first plays a minute of the lending study's traffic, at its saturation, on a server of its own.
The second draws the log of any server (HORIZON_STEP_LOG). Without --from-s they show where the most
was lent.
"""

from __future__ import annotations

import argparse
import asyncio
import math
from pathlib import Path

from rich.console import Console

from horizonserve.bench.boot import BOOT_GUESS_S, booted
from horizonserve.bench.calibrate import QUICK
from horizonserve.bench.display import Display
from horizonserve.bench.lending_picture import busiest_s, load, picture, plot
from horizonserve.bench.lending_study import ARMS, LendingConfig, LendingStudy
from horizonserve.bench.live import Live
from horizonserve.bench.server import Server
from horizonserve.bench.store import Store
from horizonserve.bench.table import KIND

DURATION_S = 60.0


def recorded(model: Path, deploy: Path, work: Path) -> Path:
    """The log of a run on a server of its own."""
    work.mkdir(parents=True, exist_ok=True)
    log = work / "steps.jsonl"
    with (
        Display(Console(), BOOT_GUESS_S + QUICK.guess_s + 2 * DURATION_S) as display,
        booted(
            model, deploy, work / "server.log", display, env={"HORIZON_STEP_LOG": str(log)}
        ) as server,
    ):
        asyncio.run(_play(server, Store(work), display))
    name = f"{log.stem}-*{log.suffix}"
    return max(work.glob(name), key=lambda file: file.stat().st_mtime)


async def _play(server: Server, store: Store, display: Display) -> None:
    async with Live.open(server) as live:
        # No part of the study: its calibration only, then one run of our own.
        config = LendingConfig(parts=(), effort=QUICK)
        study = LendingStudy(config, live, store, display, until_s=math.inf)
        await study.run()
        await study.play(study.experiment("picture", 1.0, DURATION_S, (1,), ARMS[:1]))


def main() -> None:
    """Record or read, choose, draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--log", type=Path)
    parser.add_argument("--model", type=Path, help="made there if it is missing")
    parser.add_argument("--deploy", type=Path)
    parser.add_argument("--work", type=Path, help="where the run's log goes")
    parser.add_argument("--out", type=Path, required=True, metavar="PNG")
    parser.add_argument("--from-s", type=float, help="seconds from the log's first step")
    parser.add_argument("--for-s", type=float, default=6.0)
    a = parser.parse_args()
    own = (a.model, a.deploy, a.work)
    if (a.log is None) != (None not in own):
        parser.error("give either --log, or --model, --deploy and --work")
    try:
        steps = load(a.log or recorded(*own))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    from_s = busiest_s(steps, a.for_s) if a.from_s is None else a.from_s
    plot(steps, a.out, f"Slots over time ({KIND})", from_s, a.for_s)
    print(f"{a.out}: {len(steps)} steps, {from_s:.1f} s to {from_s + a.for_s:.1f} s")
    sat_out_s = max((s.end_s - s.start_s for s in picture(steps).spans if s.lent), default=0.0)
    print(f"in the whole log nobody sat out for more than {sat_out_s:.1f} s at a time")


if __name__ == "__main__":
    main()
