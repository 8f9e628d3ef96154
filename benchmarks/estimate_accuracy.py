"""How far the remaining-time estimates are off on the real server, under light load.

    python benchmarks/estimate_accuracy.py --model DIR --deploy FILE --out DIR [--profile FILE]

Three runs of mixed traffic, each on a server of its own: with the profile, without one, and without
one on a machine that becomes twice as slow in the middle (the stage processes are stopped for every
other 10 ms). The server's step log says what was estimated before each first response and how long
it took; per class: the median of |estimated / actual - 1|.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from horizonserve.bench.boot import BOOT_GUESS_S, booted
from horizonserve.bench.display import Display
from horizonserve.bench.live import Live
from horizonserve.bench.play import Bounds, http_send, play
from horizonserve.bench.server import Server
from horizonserve.bench.table import KIND
from horizonserve.slo import RequestClass
from horizonserve.workload import Mix, make_trace

#: A stage is stopped and continued so often that no request sees it as a pause.
HALF_PERIOD_S = 0.01
#: Requests of a class within which a slower machine must have been followed.
FOLLOWED = 30
#: Without a profile, those that come before count as learning.
LEARNING = 100


def errors(lines: Sequence[dict[str, object]], name: str) -> list[float]:
    """|estimated / actual - 1| of a class, in order."""
    of_class = [line for line in lines if line["class"] == name]
    return [abs(float(line["estimate_s"]) / float(line["actual_s"]) - 1) for line in of_class]  # type: ignore[arg-type]


@contextmanager
def half_speed(pids: Sequence[int]) -> Iterator[None]:
    """Stop these processes for half of the time."""
    end = threading.Event()

    def beat() -> None:
        while not end.is_set():
            for number in (signal.SIGSTOP, signal.SIGCONT):
                for pid in pids:
                    os.kill(pid, number)
                time.sleep(HALF_PERIOD_S)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


async def traffic(server: Server, rate_rps: float, duration_s: float, seed: int) -> None:
    """Play a trace to its end."""
    mix = Mix.of_audio_share(0.3)
    trace = make_trace(mix, rate_rps, duration_s, seed)
    async with Live.open(server) as live:
        bounds = Bounds(drain_s=60.0)
        await play(
            trace,
            http_send(live.session, live.server, trace, bounds),
            dict.fromkeys(mix.classes, 60.0),
            bounds=bounds,
            on_result=lambda _result: None,
            progress=lambda _sent, _ended: None,
        )


def run(a: argparse.Namespace, name: str, profile: Path | None, slows: bool) -> list[dict]:
    """One server and its trace, or two traces where the machine becomes slower; its answers."""
    log = a.out / f"{name}.jsonl"
    env = {"HORIZON_STEP_LOG": str(log)} | ({"HORIZON_PROFILE": str(profile)} if profile else {})
    with (
        Display(Console(), BOOT_GUESS_S + (1 + slows) * a.duration_s) as display,
        booted(a.model, a.deploy, a.out / f"{name}.log", display, env=env) as server,
    ):
        with display.step(name, a.duration_s):
            asyncio.run(traffic(server, a.rate_rps, a.duration_s, a.seed))
        if slows:
            marker = len(_lines(a.out, log))
            with display.step(f"{name}, half speed", a.duration_s), half_speed(server.stages()):
                asyncio.run(traffic(server, a.rate_rps / 2, a.duration_s, a.seed + 1))
    lines = _lines(a.out, log)
    return lines[marker:] if slows else lines


def _lines(out: Path, log: Path) -> list[dict]:
    files = sorted(out.glob(f"{log.stem}-*.jsonl"), key=lambda file: file.stat().st_mtime)
    lines = files[-1].read_text().splitlines()
    return [line for line in map(json.loads, lines) if "estimate_s" in line]


def main() -> None:
    """Config, seed, run."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--model", type=Path, required=True)
    add("--deploy", type=Path, required=True)
    add("--out", type=Path, required=True)
    add("--profile", type=Path)
    add("--rate-rps", type=float, default=0.4)
    add("--duration-s", type=float, default=600.0)
    add("--seed", type=int, default=1)
    a = parser.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    console = Console()
    table = Table("run", "class", "requests", "median error", title=KIND)

    def row(run_name: str, of: Sequence[dict], after: int) -> None:
        for name in (RequestClass.T2T.value, RequestClass.T2A.value):
            found = errors(of, name)[after:]
            table.add_row(run_name, name, str(len(found)), f"{median(found):.2f}" if found else "-")

    if a.profile is not None:
        row("with the profile", run(a, "profile", a.profile, slows=False), 0)
    plain = run(a, "none", None, slows=False)
    row("without, all", plain, 0)
    row(f"without, after {LEARNING} requests", plain[LEARNING:], 0)
    row(f"half speed, after {FOLLOWED} of the class", run(a, "slow", None, slows=True), FOLLOWED)
    console.print(table)


if __name__ == "__main__":
    main()
