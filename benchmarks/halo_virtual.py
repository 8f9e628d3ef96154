"""HALO against its baselines on a virtual clock, at the paper's scale.

    python benchmarks/halo_virtual.py --out DIR
    python benchmarks/halo_virtual.py --out DIR --real --policies halo fcfs --seeds 1 --rates 15

*Simulated*: an iteration takes 13 ms + 22 us per token + 0.062 us per token of context, which gives
the paper's 46 ms for 384 requests of 1,024 tokens of context and 57 ms for 512. Services and
promises are those of the hospital (configs/services/hospital.yaml), the lengths of requests
assumptions. The policies and the step model are those of the server, between them a few lines that
stand for vLLM; with ``--real`` its scheduler class, which takes minutes a run. Every run is stored
as it ends; start it again with the same --out to go on.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from math import inf
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table

from horizonserve import services
from horizonserve.bench.intervals import mean_interval
from horizonserve.bench.services_study import kept
from horizonserve.config import Settings
from horizonserve.policy.baselines import order_of, strictest_batch_tokens
from horizonserve.policy.batch import Load, StepModel
from horizonserve.policy.edf import LostLast, earliest_deadline_first
from horizonserve.policy.halo import Decodes, Halo, HaloLimits
from horizonserve.policy.lending import Job
from horizonserve.policy.slack import Ticket
from horizonserve.policy.waiting import Waiting
from horizonserve.slo import Path, RequestClass
from horizonserve.workload.services import HOSPITAL, Call, make_calls

ROOT: Final = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "serving"))

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
    "qoserve-static": {"slots": BATCH_TOKENS, "token_budget": BATCH_TOKENS},
    "qoserve": {"slots": BATCH_TOKENS},
    # What the server does not offer: the same with HALO's rule for those whose deadline has passed.
    "qoserve-lost-last": {"scheduler": "qoserve", "slots": BATCH_TOKENS},
    # As in the paper; with those last whose deadline has passed; and with B from predicted times.
    "halo-paper": {"scheduler": "halo", "token_budget": BATCH_TOKENS, "lost": "protect"},
    "halo": {"token_budget": BATCH_TOKENS},
    "halo-dynamic": {"scheduler": "halo"},
}
#: After the last arrival, until every first token is there or late.
DRAIN_S: Final = 10.0
#: Traffic that says from which rate on the machine is full.
_REFERENCE_RPS, _REFERENCE_S = 20.0, 300.0
#: Rounding of floating-point times is no violation.
_EPSILON_S: Final = 1e-6


def iteration_s(tokens: float, context_tokens: float) -> float:
    """What the machine takes."""
    return 0.013 + 22e-6 * tokens + 0.062e-6 * context_tokens


def needed_s(calls: Sequence[Call], batch_tokens: int | None, limit_s: float) -> float:
    """Time that the calls take in full iterations, of ``batch_tokens`` or ``limit_s``.

    At best: each prompt in one chunk.
    """
    tokens = sum(call.prompt_tokens + call.answer_tokens - 1 for call in calls)
    context_tokens = sum(
        p + (answer - 1) * (p + answer / 2)
        for p, answer in ((call.prompt_tokens, call.answer_tokens) for call in calls)
    )
    work_s = iteration_s(tokens, context_tokens) - iteration_s(0, 0)
    if batch_tokens is None:
        return work_s / (1 - iteration_s(0, 0) / limit_s)
    return work_s + iteration_s(0, 0) * tokens / batch_tokens


class Stage:
    """The requests of the server, and who computes in an iteration."""

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.model = StepModel()
        self.running: list[Job] = []
        self.waiting: list[Job] = []
        table = services.load(TABLE)
        changes = POLICIES[policy]
        self.slots = changes.get("slots", SLOTS)
        self.budget = changes.get("token_budget", TOKENS)
        self.order = order_of(self.policy)
        self.halo = None
        if self.policy.startswith("halo"):
            fixed = changes.get("token_budget")
            usual = Settings().changed({"lost": changes.get("lost", "demote")})
            limits = HaloLimits(
                table.strictest_tbt_s, TOKENS, fixed, lost_last=usual.lost == "demote"
            )
            self.halo = Halo(self.model, limits)
        self.tbt_min_s = table.strictest_tbt_s
        self.lost_last = LostLast()
        #: Most requests, and most tokens in their KV caches, that ran at a time.
        self.most_running = self.most_kv_tokens = 0

    def arrive(self, job: Job) -> None:
        """A request comes."""
        self.order.arrived(job.ticket, (other.ticket for other in self.waiting))
        self.waiting.append(job)

    def plan(self, now_s: float) -> tuple[list[Job], list[Job], list[Job], int]:
        """Decodes that compute, prompts that run, those that may enter, and tokens for all."""
        decodes = [job for job in self.running if job.decode]
        prefills = [job for job in self.running if not job.decode]
        halo = self.halo
        if halo is None:
            tokens = self.budget
            if self.policy.startswith("qoserve"):
                static = self.policy == "qoserve-static"
                tokens = strictest_batch_tokens(self.model, self.running, self.budget, static)
            return decodes, prefills, self._ordered(now_s), tokens
        arrays = Decodes(
            np.array([job.ticket.released_s for job in decodes], float),
            np.array([job.ticket.tbt_s for job in decodes], float),
            np.array([job.context_tokens for job in decodes], float),
        )

        def earliest(most: int) -> list[Job]:
            free = min(most, self.slots - len(self.running))
            jobs = {job.ticket: job for job in self.waiting}
            groups = Waiting(jobs)
            if halo.limits.lost_last:
                by_s = now_s + halo.limits.tbt_min_s
                tickets = self.lost_last.order(groups, free, by_s)
            else:
                tickets = earliest_deadline_first(groups, free)
            return [jobs[ticket] for ticket in tickets]

        found = halo.plan(arrays, prefills, earliest, now_s)
        computing = [decodes[index] for index in found.order[: found.computing].tolist()]
        return computing, found.prefills, found.enter, found.tokens

    def _ordered(self, now_s: float) -> list[Job]:
        free = self.slots - len(self.running)
        if free <= 0 or not self.waiting:
            return []
        jobs = {job.ticket: job for job in self.waiting}
        if self.policy == "qoserve-lost-last":
            by_s = now_s + self.tbt_min_s
            return [jobs[ticket] for ticket in self.lost_last.order(Waiting(jobs), free, by_s)]
        return [jobs[ticket] for ticket in self.order.order(list(jobs), now_s)[:free]]

    def iterate(self, now_s: float) -> tuple[float, list[Job]]:
        """One iteration; when it ends, and who got a token."""
        computing, prefills, enter, tokens = self.plan(now_s)
        left = tokens - len(computing)
        chunks = []
        for job in (*prefills, *enter):
            if left <= 0:
                break
            chunks.append((job, min(left, job.tokens)))
            left -= chunks[-1][1]
        contexts = 0
        for job in computing:
            job.context_tokens += 1
            contexts += job.context_tokens
        attention = float(contexts)
        for job, count in chunks:
            if not job.runs:
                job.runs = True
                self.waiting.remove(job)
                self.running.append(job)
                self.order.started(job.ticket)
                self.lost_last.entered(job.ticket, now_s + self.tbt_min_s)
            attention += count * (job.context_tokens + count / 2)
            job.context_tokens += count
            job.tokens -= count
            contexts += job.context_tokens
        prompts = sum(count for _, count in chunks)
        took_s = iteration_s(len(computing) + prompts, contexts)
        self.model.observe(Load(len(computing), prompts, attention), took_s)
        now_s += took_s
        generated = computing + [job for job, _ in chunks if not job.tokens]
        for job in generated:
            first = not job.decode
            job.decode, job.tokens = True, 1
            self.order.generated(job.ticket, 1, first, now_s)
            job.ticket.token(now_s)
            job.to_generate -= 1
        self.most_running = max(self.most_running, len(self.running))
        kv_tokens = sum(job.context_tokens for job in self.running)
        self.most_kv_tokens = max(self.most_kv_tokens, kv_tokens)
        self.running = [job for job in self.running if job.to_generate > 0]
        return now_s, generated


def play(stage: Stage, calls: Sequence[Call], until_s: float) -> dict[str, list[float]]:
    """When each token of each request was generated, by request."""
    table = services.load(TABLE)
    generated_s: dict[str, list[float]] = {f"r{i}": [] for i in range(len(calls))}
    now_s, coming = 0.0, 0
    while now_s <= until_s:
        while coming < len(calls) and calls[coming].at_s <= now_s:
            stage.arrive(_job(f"r{coming}", calls[coming], table))
            coming += 1
        if stage.running or stage.waiting:
            now_s, generated = stage.iterate(now_s)
            for job in generated:
                generated_s[job.ticket.group].append(now_s)
        elif coming < len(calls):
            now_s = calls[coming].at_s
        else:
            break
    return generated_s


def _job(name: str, call: Call, table: services.Services) -> Job:
    promise = table.promised(call.service, None)
    ticket = Ticket(
        name,
        RequestClass.T2T,
        Path.SHORT,
        call.at_s,
        call.at_s + promise.ttft_s,
        promise.ttft_s,
        promise.tbt_s,
        call.service,
        call.prompt_tokens,
    )
    return Job(None, ticket, call.prompt_tokens, 0, 0, call.answer_tokens, runs=False)


def play_real(policy: str, calls: Sequence[Call], until_s: float) -> dict[str, list[float]]:
    """The same on vLLM's scheduler with ours around it."""
    from engine import make_scheduler, stop_clock
    from vllm.v1.outputs import ModelRunnerOutput

    from horizonserve import instance
    from horizonserve.serving.plain import HorizonScheduler

    logging.disable(logging.WARNING)
    settings = {"scheduler": policy} | POLICIES[policy]
    with tempfile.TemporaryDirectory() as records:
        instance.DIRECTORY = pathlib.Path(records)
        os.environ["HORIZON_SERVICES"] = str(TABLE)
        scheduler = make_scheduler(
            HorizonScheduler,
            slots=SLOTS,
            token_budget=TOKENS,
            blocks=BLOCKS,
            additional_config={"horizon": settings},
        )
        # Its KV blocks alone are more objects than all else, and live to the end.
        gc.freeze()
        stop_clock(scheduler)
        clock = scheduler.now_s
        clock[0] = 0.0
        generated_s: dict[str, list[float]] = {f"r{i}": [] for i in range(len(calls))}
        coming = 0
        while coming < len(calls) or scheduler.has_unfinished_requests():
            if clock[0] > until_s:
                break
            while coming < len(calls) and calls[coming].at_s <= clock[0]:
                _add(scheduler, f"r{coming}", calls[coming])
                coming += 1
            if not scheduler.has_unfinished_requests():
                clock[0] = calls[coming].at_s
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
                    generated_s[request.request_id].append(clock[0])
            index = {name: i for i, name in enumerate(names)}
            scheduler.update_from_output(output, ModelRunnerOutput(names, index, sampled))
        scheduler.shutdown()
    return generated_s


def _add(scheduler: Any, name: str, call: Call) -> None:
    from engine import make_request

    scheduler.add_request(
        make_request(
            name,
            prompt_tokens=call.prompt_tokens,
            output_tokens=call.answer_tokens,
            extra_args={"service": call.service},
        )
    )
    ticket = scheduler.requests[name].horizonserve_ticket
    late_s = scheduler.now_s[0] - call.at_s
    ticket.arrival_s -= late_s
    ticket.deadline_s -= late_s


def run(
    policy: str, rate_rps: float, seed: int, duration_s: float, burst: bool, real: bool
) -> dict[str, Any]:
    """One run."""
    calls = make_calls(HOSPITAL, rate_rps, duration_s, seed, burst)
    stage, until_s = Stage(policy), duration_s + DRAIN_S
    generated_s = play_real(policy, calls, until_s) if real else play(stage, calls, until_s)
    table = services.load(TABLE)
    head = {"policy": policy, "rate_rps": rate_rps, "seed": seed, "burst": burst}
    peaks = {"most_running": stage.most_running, "most_kv_tokens": stage.most_kv_tokens}
    promises = [table.promised(call.service, None) for call in calls]
    token_s = [[s - call.at_s for s in generated_s[f"r{i}"]] for i, call in enumerate(calls)]
    held = policy.startswith("halo")
    return head | peaks | kept(promises, token_s, held=held, slack_s=_EPSILON_S)


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
            own = [r for r in runs if r["policy"] == policy and r["burst"] is burst]
            held_rps = _held_rps(own)
            at = [r for r in own if r["rate_rps"] == held_rps]
            running = max((r["most_running"] for r in at), default=0)
            kv_tokens = max((r["most_kv_tokens"] for r in at), default=0)
            console.print(
                f"{policy}: P99 of the first token holds up to {held_rps:g}/s in every seed,"
                f" with up to {running} requests and {kv_tokens} KV tokens",
                highlight=False,
            )
        traces = [
            make_calls(HOSPITAL, _REFERENCE_RPS, _REFERENCE_S, seed, burst)
            for seed in sorted({one["seed"] for one in runs if one["burst"] is burst})
        ]
        for batch_tokens, limit_s in ((BATCH_TOKENS, inf), (None, 0.045), (None, 0.050)):
            full = [
                _REFERENCE_RPS * _REFERENCE_S / needed_s(trace, batch_tokens, limit_s)
                for trace in traces
            ]
            what = f"B = {batch_tokens}" if batch_tokens else f"{1e3 * limit_s:g} ms"
            console.print(
                f"iterations of {what} are all full from {min(full):.1f} to {max(full):.1f}/s on",
                highlight=False,
            )


def _held_rps(runs: list[dict[str, Any]]) -> float:
    """The highest rate up to which P99 of the first token is in time in every seed."""
    held_rps = 0.0
    for rate_rps in sorted({run["rate_rps"] for run in runs}):
        if any(run["p99"] > 1 + _EPSILON_S for run in runs if run["rate_rps"] == rate_rps):
            break
        held_rps = rate_rps
    return held_rps


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
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--rates", type=float, nargs="+", default=[13.0, 15.0, 17.0, 19.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument("--duration-s", type=float, default=300.0)
    parser.add_argument("--burst", action="store_true")
    parser.add_argument("--real", action="store_true", help="on the scheduler class of vLLM")
    a = parser.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    file = a.out / f"runs-{a.duration_s:g}s{'-real' if a.real else ''}.jsonl"
    runs = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    done = {(r["policy"], r["rate_rps"], r["seed"], r["burst"]) for r in runs}
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        under_way = [
            pool.submit(run, policy, rate, seed, a.duration_s, a.burst, a.real)
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
