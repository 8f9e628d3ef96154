"""Run a study on a server of its own, and write and print what came of it."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rich.console import Console

from horizonserve.bench.boot import BOOT_GUESS_S, booted
from horizonserve.bench.display import Display
from horizonserve.bench.live import Live
from horizonserve.bench.server import Server
from horizonserve.bench.store import Run, Store
from horizonserve.bench.study import Study, StudyConfig, TimeIsUpError
from horizonserve.bench.summary import Ratio, rows, to_csv, to_json
from horizonserve.bench.table import KIND, ratio_line, table

_STOP_S: Final = 30.0


def study_arguments(description: str | None) -> argparse.ArgumentParser:
    """A command line with what every study asks for."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", type=Path, required=True, help="made there if it is missing")
    parser.add_argument("--deploy", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--port", type=int)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--time-limit-s", type=float, default=5_400.0)
    parser.add_argument("--quick", action="store_true", help="a few minutes, to see that it works")
    return parser


def run_study(
    kind: type[Study],
    config: StudyConfig,
    model_dir: Path,
    deploy: Path,
    out: Path,
    *,
    port: int | None = None,
    env: Mapping[str, str] | None = None,
    console: Console | None = None,
) -> dict[str, list[Run]]:
    """Run what is missing of a study, then print all of it; ``env`` is for its server.

    Raises:
        ServerError: the server did not start or died.
        LiveError: it did not do what was asked of it.
        StoreError: ``out`` holds another study.
    """
    console = console or Console()
    until_s = time.monotonic() + config.time_limit_s - _STOP_S
    store = Store(out)
    with (
        Display(console, BOOT_GUESS_S + config.guess_s) as display,
        booted(model_dir, deploy, out / "server.log", display, port=port, env=env) as server,
    ):
        study, reason = asyncio.run(_run(kind, config, server, store, display, until_s))
    show(console, study)
    if reason:
        console.print(reason, style="bold yellow")
    return study.runs


async def _run(
    kind: type[Study],
    config: StudyConfig,
    server: Server,
    store: Store,
    display: Display,
    until_s: float,
) -> tuple[Study, str]:
    async with Live.open(server) as live:
        study = kind(config, live, store, display, until_s)
        try:
            await study.run()
        except TimeIsUpError as error:
            return study, str(error)
        return study, ""


def show(console: Console, study: Study) -> None:
    """Print the tables, and write them as CSV and JSON."""
    if study.calibration is None:
        return
    console.print(study.calibration.line(), highlight=False)
    every, against = [], list[Ratio]()
    for name, runs in study.runs.items():
        if not runs:
            continue
        of_experiment = rows(runs)
        every += of_experiment
        head = runs[0].head
        seeds = len({run.head["seed"] for run in runs})
        title = (
            f"{name}: {head['rate_rps']:.2f} requests/s, {head['duration_s']:.0f} s,"
            f" {seeds} seed{'s' if seeds > 1 else ''}"
        )
        console.print(table(of_experiment, title))
        if not name.startswith("pick"):
            for one in study.ratios(name):
                against.append(one)
                console.print(ratio_line(one), highlight=False)
    out = study.store.directory
    facts = {"kind": KIND, **study.calibration.to_json()}
    (out / "tables.csv").write_text(to_csv(every), encoding="utf-8")
    (out / "tables.json").write_text(to_json(every, against, facts), encoding="utf-8")
