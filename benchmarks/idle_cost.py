"""Throughput with the plugin on and nothing for it to do, against stock vLLM-Omni.

    python benchmarks/idle_cost.py --model DIR --deploy FILE --out DIR

Two servers stand side by side: ``--scheduler default``, and ``--scheduler horizon`` with spatial
control on CPU cores. Only one works at a time: both answer the same batch of text requests in
turn, never more at once than there are slots, so that no request is hidden and no stage capped.
The order alternates from round to round.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import time
from pathlib import Path

from rich.console import Console

from horizonserve.bench.boot import BOOT_GUESS_S, booted
from horizonserve.bench.display import Display
from horizonserve.bench.intervals import mean_interval
from horizonserve.bench.live import Live, LiveError
from horizonserve.bench.machine import Neighbours
from horizonserve.bench.result import Status
from horizonserve.bench.server import Server
from horizonserve.bench.table import KIND
from horizonserve.slo import RequestClass
from horizonserve.workload import Item

AT_ONCE = 4
ROUND_GUESS_S = 25.0
ARMS = ("default", "horizon")


async def batch_s(live: Live, requests: int, tokens: int) -> float:
    """Seconds that a server takes to answer so many requests, a few at once."""
    ahead = iter(range(requests))

    async def client() -> None:
        for index in ahead:
            result = await live.ask(Item(0.0, RequestClass.T2T, 64, tokens, index), index)
            if result.status is not Status.OK:
                raise LiveError(f"request {index}: {result.error}")

    start_s = time.monotonic()
    await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    return time.monotonic() - start_s


async def measure(lives: dict[str, Live], a: argparse.Namespace, display: Display) -> None:
    """Rounds, each written as it ends; then the ratio."""
    log_ratios: list[float] = []
    with (a.out / "rounds.jsonl").open("w", encoding="utf-8") as file:
        for live in lives.values():
            await batch_s(live, 2 * AT_ONCE, a.tokens)  # warm
        for number in range(a.rounds):
            with display.step(f"round {number + 1}/{a.rounds}", ROUND_GUESS_S):
                neighbours = Neighbours(lambda pid: any(x.server.owns(pid) for x in lives.values()))
                neighbours.start()
                took_s = {}
                for arm in ARMS if number % 2 else reversed(ARMS):
                    took_s[arm] = await batch_s(lives[arm], a.requests, a.tokens)
            log_ratios.append(math.log(took_s["default"] / took_s["horizon"]))
            line = {"round": number, "took_s": took_s, "other_cores": neighbours.cores()}
            file.write(json.dumps(line) + "\n")
            file.flush()
    low, high = (math.exp(end) for end in mean_interval(log_ratios))
    ratio = math.exp(math.fsum(log_ratios) / len(log_ratios))
    said = {"kind": KIND, "rounds": len(log_ratios), "throughput": ratio, "low": low, "high": high}
    (a.out / "idle_cost.json").write_text(json.dumps(said, indent=1), encoding="utf-8")
    display.console.print(
        f"throughput of horizon over default: {ratio:.4f} (95% {low:.4f} to {high:.4f},"
        f" {len(log_ratios)} rounds; {KIND})",
        highlight=False,
    )


async def run(servers: dict[str, Server], a: argparse.Namespace, display: Display) -> None:
    """Talk to both servers."""
    async with contextlib.AsyncExitStack() as stack:
        lives = {
            arm: await stack.enter_async_context(Live.open(one)) for arm, one in servers.items()
        }
        await measure(lives, a, display)


def main() -> None:
    """Config, run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="made there if it is missing")
    parser.add_argument("--deploy", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=32)
    a = parser.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    env = {"horizon": {"HORIZON_SPATIAL_BACKEND": "cores"}, "default": {}}
    with (
        Display(Console(), 2 * BOOT_GUESS_S + a.rounds * ROUND_GUESS_S) as display,
        contextlib.ExitStack() as stack,
    ):
        servers = {
            arm: stack.enter_context(
                booted(
                    a.model,
                    a.deploy,
                    a.out / f"{arm}.log",
                    display,
                    scheduler=arm,
                    env=env[arm],
                )
            )
            for arm in ARMS
        }
        asyncio.run(run(servers, a, display))


if __name__ == "__main__":
    main()
