"""HALO and its baselines on a real `vllm serve` with four LoRA adapters, over HTTP.

    python benchmarks/halo.py --model DIR --out DIR

compare    policies interleaved on one server at multiples of its saturation: late first tokens and
           tokens after their TBT (bench/services_study.py says how both are counted)
delivery   HALO alone on a server that paces: how far the times between tokens are from TBT

Start it again with the same --out to go on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import yaml
from rich.console import Console
from rich.table import Table

from horizonserve import services
from horizonserve.bench.intervals import mean_interval
from horizonserve.bench.live import Live
from horizonserve.bench.plain import served
from horizonserve.bench.server import Server
from horizonserve.bench.services_study import (
    ServicesConfig,
    ServicesStudy,
    delivery,
    full_iteration_s,
    scaled,
)
from horizonserve.bench.table import KIND
from horizonserve.models import make_model
from horizonserve.models.llama_lora import ADAPTERS, SERVICES
from horizonserve.workload.services import HOSPITAL

TABLE: Final = Path(__file__).parents[1] / "configs" / "services" / "hospital.yaml"
#: Threads on whatever core is free; more of them would only wait for each other.
ENV: Final = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
#: HALO's requests may outnumber its batch.
SLOTS_PER_BATCH: Final = 4


@contextmanager
def server(a: argparse.Namespace, name: str, table: Path, **env: str) -> Iterator[Server]:
    """A server of the model and its adapters under HALO."""
    env = {**ENV, "HORIZON_SERVICES": str(table), **env}
    slots = SLOTS_PER_BATCH * a.batch
    extra = [
        *("--max-num-seqs", str(slots), "--max-num-batched-tokens", str(max(512, slots))),
        *("--max-model-len", "4096", "--enforce-eager", "--no-enable-prefix-caching"),
    ]
    adapters = {service: a.model / ADAPTERS / service for service in SERVICES}
    log = a.out / f"{name}.log"
    with served(a.model, adapters, log, scheduler="halo", extra=extra, env=env) as one:
        yield one


def show(console: Console, runs: Sequence[dict[str, Any]], policies: Sequence[str]) -> None:
    """Means over the seeds, with 95% intervals."""
    loads = sorted({run["load"] for run in runs})
    table = Table(title=f"late first tokens, % (tokens after their TBT, %); {KIND}")
    for title in ("policy", *(f"{load:g}x saturation" for load in loads)):
        table.add_column(title, justify="left" if title == "policy" else "right")
    for policy in policies:
        cells = []
        for load in loads:
            some = [r for r in runs if (r["policy"], r["load"]) == (policy, load)]
            late = [100 * run["late"] for run in some]
            broken = 100 * float(np.mean([run["broken"] for run in some])) if some else 0.0
            text = f"{np.mean(late):.1f}" if late else "-"
            if len(late) > 1:
                low, high = mean_interval(late)
                text += f" +- {(high - low) / 2:.1f}"
            cells.append(f"{text} ({broken:.2f})")
        table.add_row(policy, *cells)
    console.print(table)
    console.print(
        f"{sum(r['requests'] for r in runs)} requests, {sum(r['failed'] for r in runs)} failed"
    )


def scaled_table(a: argparse.Namespace, console: Console) -> tuple[Path, float]:
    """The table for this machine and the time of a full iteration, measured once per ``--out``."""
    path, note = a.out / "services.yaml", a.out / "full.json"
    if not note.exists():

        async def full_s(one: Server) -> float:
            async with Live.open(one) as live:
                return await full_iteration_s(live, SERVICES[0], a.batch)

        with server(a, "calibration", TABLE, HORIZON_PACED="false") as one:
            found_s = asyncio.run(full_s(one))
        table = scaled(services.load(TABLE), found_s)
        path.write_text(yaml.safe_dump(table.model_dump(exclude_none=True)), encoding="utf-8")
        note.write_text(json.dumps({"full_s": found_s}), encoding="utf-8")
    found_s = float(json.loads(note.read_text(encoding="utf-8"))["full_s"])
    console.print(f"an iteration of {a.batch} tokens: {1e3 * found_s:.1f} ms; {KIND}")
    return path, found_s


async def compare(
    a: argparse.Namespace, one: Server, table: Path, full_s: float, console: Console
) -> list[dict[str, Any]]:
    """Every policy on one server."""
    config = ServicesConfig(
        table=services.load(table),
        shapes=HOSPITAL,
        batch=a.batch,
        full_s=full_s,
        policies=tuple(a.policies),
        loads=tuple(a.loads),
        seeds=tuple(a.seeds),
        duration_s=a.duration_s,
        burst=a.burst,
        length_scale=a.length_scale,
    )
    async with Live.open(one) as live:
        return await ServicesStudy(config, live, a.out).run(console.print)


async def paced(one: Server, tbts_ms: Sequence[float]) -> dict[float, dict[str, float]]:
    """How exactly tokens leave, for some TBTs."""
    async with Live.open(one) as live:
        return {tbt_ms: await delivery(live, SERVICES[0], tbt_ms) for tbt_ms in tbts_ms}


def main() -> None:
    """Config, seeds, run."""
    usual = ServicesConfig(table=services.load(TABLE), shapes=HOSPITAL)
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="made there if it is missing")
    add("--out", type=Path, required=True)
    add("--size", default="tiny", choices=["tiny", "small"])
    add("--parts", nargs="+", default=["compare", "delivery"], choices=["compare", "delivery"])
    add("--batch", type=int, default=usual.batch)
    add("--policies", nargs="+", default=usual.policies)
    add("--loads", type=float, nargs="+", default=usual.loads)
    add("--seeds", type=int, nargs="+", default=usual.seeds)
    add("--duration-s", type=float, default=usual.duration_s)
    add("--length-scale", type=float, default=usual.length_scale)
    add("--burst", action="store_true")
    a = parser.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    make_model("llama-lora", a.size, a.model)
    console = Console(width=120)
    if "compare" in a.parts:
        # Who keeps promises is not a question of when tokens leave.
        table, full_s = scaled_table(a, console)
        with server(a, "compare", table, HORIZON_PACED="false") as one:
            runs = asyncio.run(compare(a, one, table, full_s, console))
        show(console, runs, a.policies)
    if "delivery" in a.parts:
        with server(a, "delivery", TABLE, HORIZON_ON_FINISH="pace") as one:
            found = asyncio.run(paced(one, (50.0, 100.0, 200.0)))
        for tbt_ms, share in found.items():
            console.print(
                f"TBT {tbt_ms:g} ms: {share['tokens']:.0f} tokens,"
                f" off by p50 {share['p50_ms']:.2f},"
                f" p99 {share['p99_ms']:.2f} ms; first token off by p99 {share['first_ms']:.2f} ms;"
                f" {KIND}",
                highlight=False,
            )


if __name__ == "__main__":
    main()
