"""HALO against its baselines on a virtual clock, at the paper's scale.

    python benchmarks/halo_virtual.py --out DIR

*Simulated*: the real scheduler classes; an iteration takes 13 ms + 22 us per token + 0.062 us per
token of context, which gives the paper's 46 ms for 384 requests of 1,024 tokens of context and 57
ms for 512. Services and promises are those of the hospital (configs/services/hospital.yaml), the
lengths of requests assumptions. Every run is stored as it ends; start it again with the same --out
to go on.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table

ROOT: Final = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "serving"))

from engine import make_request, make_scheduler, stop_clock  # noqa: E402
from vllm.v1.outputs import ModelRunnerOutput  # noqa: E402

from horizonserve import instance, services  # noqa: E402
from horizonserve.bench.intervals import mean_interval  # noqa: E402
from horizonserve.bench.services_study import kept  # noqa: E402
from horizonserve.serving.plain import HorizonScheduler  # noqa: E402
from horizonserve.workload.services import HOSPITAL, Call, make_calls  # noqa: E402

TABLE: Final = ROOT / "configs" / "services" / "hospital.yaml"
#: B, and with it the slots of the baselines; HALO's requests may outnumber it.
BATCH_TOKENS: Final = 384
SLOTS: Final = 1_536
TOKENS: Final = 2_048
#: Free numbers enough for every request to its end.
BLOCKS: Final = 160_000
POLICIES: Final[dict[str, dict[str, Any]]] = {
    "fcfs": {"slots": BATCH_TOKENS, "token_budget": BATCH_TOKENS},
    "vtc-t": {"slots": BATCH_TOKENS, "token_budget": BATCH_TOKENS},
    "vtc-r": {"slots": BATCH_TOKENS, "token_budget": BATCH_TOKENS},
    "qoserve-static": {"slots": BATCH_TOKENS},
    "qoserve": {"slots": BATCH_TOKENS},
    "halo": {"token_budget": BATCH_TOKENS},
    "halo-dynamic": {"scheduler": "halo", "dynamic_budget": True},
}
#: Rounding of floating-point times is no violation.
_EPSILON_S: Final = 1e-6


def iteration_s(tokens: int, context_tokens: int) -> float:
    """What the machine takes."""
    return 0.013 + 22e-6 * tokens + 0.062e-6 * context_tokens


def play(policy: str, calls: Sequence[Call], until_s: float) -> dict[str, list[float]]:
    """When each token of each request was generated, by request."""
    logging.disable(logging.WARNING)
    settings = {"scheduler": policy} | POLICIES[policy]
    with tempfile.TemporaryDirectory() as records:
        instance.DIRECTORY = Path(records)
        os.environ["HORIZON_SERVICES"] = str(TABLE)
        scheduler = make_scheduler(
            HorizonScheduler,
            slots=SLOTS,
            token_budget=TOKENS,
            blocks=BLOCKS,
            additional_config={"horizon": settings},
        )
        stop_clock(scheduler)
        clock, zero_s = scheduler.now_s, scheduler.now_s[0]
        generated_s: dict[str, list[float]] = {f"r{i}": [] for i in range(len(calls))}
        coming = 0
        while coming < len(calls) or scheduler.has_unfinished_requests():
            now_s = clock[0] - zero_s
            if now_s > until_s:
                break
            while coming < len(calls) and calls[coming].at_s <= now_s:
                _add(scheduler, f"r{coming}", calls[coming], zero_s)
                coming += 1
            if not scheduler.has_unfinished_requests():
                clock[0] = zero_s + calls[coming].at_s
                continue
            output = scheduler.schedule()
            names = list(output.num_scheduled_tokens)
            requests = [scheduler.requests[name] for name in names]
            contexts = sum(request.num_computed_tokens for request in requests)
            clock[0] += iteration_s(output.total_num_scheduled_tokens, contexts)
            sampled: list[list[int]] = []
            for request in requests:
                done = request.num_computed_tokens >= request.num_tokens
                sampled.append([7] if done else [])
                if done:
                    generated_s[request.request_id].append(clock[0] - zero_s)
            index = {name: i for i, name in enumerate(names)}
            scheduler.update_from_output(output, ModelRunnerOutput(names, index, sampled))
        scheduler.shutdown()
    return generated_s


def _add(scheduler: Any, name: str, call: Call, zero_s: float) -> None:
    scheduler.add_request(
        make_request(
            name,
            prompt_tokens=call.prompt_tokens,
            output_tokens=call.answer_tokens,
            extra_args={"service": call.service},
        )
    )
    ticket = scheduler.requests[name].horizonserve_ticket
    late_s = scheduler.now_s[0] - zero_s - call.at_s
    ticket.arrival_s -= late_s
    ticket.deadline_s -= late_s


def run(policy: str, rate_rps: float, seed: int, duration_s: float, burst: bool) -> dict[str, Any]:
    """One run."""
    calls = make_calls(HOSPITAL, rate_rps, duration_s, seed, burst)
    generated_s = play(policy, calls, duration_s + 60.0)
    table = services.load(TABLE)
    return {"policy": policy, "rate_rps": rate_rps, "seed": seed, "burst": burst} | kept(
        [table.promised(call.service, None) for call in calls],
        [[s - call.at_s for s in generated_s[f"r{i}"]] for i, call in enumerate(calls)],
        held=policy.startswith("halo"),
        slack_s=_EPSILON_S,
    )


def show(console: Console, runs: list[dict[str, Any]]) -> None:
    """Means over the seeds, with 95% intervals."""
    for burst in sorted({one["burst"] for one in runs}):
        arrivals = "bursty" if burst else "Poisson"
        table = Table(
            title=f"late first tokens, % (tokens after their TBT, %); {arrivals}, simulated"
        )
        rates = sorted({one["rate_rps"] for one in runs if one["burst"] is burst})
        for title in ("policy", *(f"{rate:g}/s" for rate in rates)):
            table.add_column(title, justify="left" if title == "policy" else "right")
        for policy in POLICIES:
            cells = []
            for rate in rates:
                key = (policy, rate, burst)
                some = [r for r in runs if (r["policy"], r["rate_rps"], r["burst"]) == key]
                cells.append(_cell(some))
            table.add_row(policy, *cells)
        console.print(table)
        for policy in POLICIES:
            held = [r for r in rates if _held(runs, policy, r, burst)]
            console.print(
                f"{policy}: P99 of the first token holds up to {max(held, default=0):g}/s",
                highlight=False,
            )


def _held(runs: list[dict[str, Any]], policy: str, rate: float, burst: bool) -> bool:
    key = (policy, rate, burst)
    some = [r["p99"] for r in runs if (r["policy"], r["rate_rps"], r["burst"]) == key]
    return bool(some) and float(np.mean(some)) <= 1 + _EPSILON_S


def _cell(some: list[dict[str, Any]]) -> str:
    if not some:
        return "-"
    late = [100 * one["late"] for one in some]
    broken = 100 * float(np.mean([one["broken"] for one in some]))
    text = f"{np.mean(late):.1f}"
    if len(late) > 1:
        low, high = mean_interval(late)
        text += f" +- {(high - low) / 2:.1f}"
    return f"{text} ({broken:.2f})"


def main() -> None:
    """Config, seeds, run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rates", type=float, nargs="+", default=[13.0, 15.0, 17.0, 19.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument("--duration-s", type=float, default=300.0)
    parser.add_argument("--burst", action="store_true")
    a = parser.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    file = a.out / f"runs-{a.duration_s:g}s.jsonl"
    runs = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    done = {(r["policy"], r["rate_rps"], r["seed"], r["burst"]) for r in runs}
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        under_way = [
            pool.submit(run, policy, rate, seed, a.duration_s, a.burst)
            for seed in a.seeds
            for rate in a.rates
            for policy in a.policies
            if (policy, rate, seed, a.burst) not in done
        ]
        for one in under_way:
            runs.append(one.result())
            with file.open("a") as out:
                out.write(json.dumps(runs[-1]) + "\n")
    show(Console(width=120), runs)


if __name__ == "__main__":
    main()
