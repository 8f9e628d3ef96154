"""HALO and its baselines on one `vllm serve`, over HTTP, with promises scaled to the machine.

    B            largest batch of an iteration, given; its time T_B is measured: B streams at once
    scale        all promises x 1.09 T_B / strictest TBT of the table (46 ms for 50 ms in HALO 6.1)
    saturation   B / T_B tokens a second, over the mean prompt and answer of a request
    late         a first token after its deadline, or none at all
    broken       a token that leaves later than TBT after the one before; under HALO tokens leave
                 at their release times (shaper.py)

Policies are switched on the running server, seed by seed, so that all of them meet the same
machine. Its tokens are not held back: release times follow from when tokens came, and a server that
paces would do so under every policy.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from horizonserve.bench.client import send
from horizonserve.bench.live import Live, LiveError
from horizonserve.bench.result import Result, Status
from horizonserve.bench.server import MODEL_NAME
from horizonserve.services import Promised, Service, Services
from horizonserve.shaper import Finish, Pace, Releases
from horizonserve.slo import RequestClass
from horizonserve.workload import Item
from horizonserve.workload.prompt import prompt
from horizonserve.workload.services import Call, Shape, make_calls

#: What B's iteration takes, as a share of the strictest TBT that it was chosen for.
FULL: Final = 46 / 50
LIMIT_S: Final = 120.0
#: What HTTP adds to a time, at most; it breaks no promise.
JITTER_S: Final = 0.005
#: Tokens of the chat template around a prompt.
_TEMPLATE_TOKENS: Final = 7
_CALIBRATION_TOKENS: Final = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicesConfig:
    """Everything that decides the figures."""

    table: Services
    shapes: Mapping[str, Shape]
    #: B, and how long its iteration takes.
    batch: int = 16
    full_s: float = 1.0
    #: ``halo-paper`` is HALO to the letter, ``halo-dynamic`` finds B itself.
    policies: tuple[str, ...] = (
        *("fcfs", "vtc-t", "vtc-r", "qoserve-static", "qoserve"),
        *("halo-paper", "halo", "halo-dynamic"),
    )
    loads: tuple[float, ...] = (1.0,)
    seeds: tuple[int, ...] = (1, 2, 3)
    duration_s: float = 60.0
    burst: bool = False
    #: Of all lengths, so that a run has enough requests.
    length_scale: float = 0.2

    @property
    def saturation_rps(self) -> float:
        """Requests a second whose tokens fill every iteration."""
        calls = make_calls(self.shapes, 1.0, 2_000.0, 0, scale=self.length_scale)
        tokens = float(np.mean([call.prompt_tokens + call.answer_tokens for call in calls]))
        return self.batch / self.full_s / (_TEMPLATE_TOKENS + tokens)

    def changes(self, policy: str) -> dict[str, Any]:
        """Settings of a policy: B, and for all but HALO as many slots."""
        if policy.startswith("halo"):
            dynamic = policy == "halo-dynamic"
            return {
                "scheduler": "halo",
                "token_budget": None if dynamic else self.batch,
                "slots": None,
                "lost": "protect" if policy == "halo-paper" else "demote",
            }
        # QoServe finds its batch anew for each iteration.
        budget = None if policy == "qoserve" else self.batch
        return {"scheduler": policy, "token_budget": budget, "slots": self.batch}


@dataclass(slots=True)
class ServicesStudy:
    """Plays it on a server whose table of services is the one of ``config``; each run is written as
    it ends."""

    config: ServicesConfig
    live: Live
    out: Path

    async def run(self, say: Callable[[str], object]) -> list[dict[str, Any]]:
        """Every run that is missing; all runs.

        Raises:
            LiveError: the server did not do what was asked of it.
        """
        c = self.config
        runs = self._stored()
        done = {(run["policy"], run["load"], run["seed"]) for run in runs}
        for seed in c.seeds:
            for load in c.loads:
                for policy in c.policies:
                    if (policy, load, seed) in done:
                        continue
                    say(f"{policy}, {load:g}x saturation, seed {seed}")
                    runs.append(await self._run(policy, load, seed))
                    with self._file.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(runs[-1]) + "\n")
        return runs

    @property
    def _file(self) -> Path:
        return self.out / "runs.jsonl"

    def _stored(self) -> list[dict[str, Any]]:
        if not self._file.exists():
            return []
        return [json.loads(line) for line in self._file.read_text(encoding="utf-8").splitlines()]

    async def _run(self, policy: str, load: float, seed: int) -> dict[str, Any]:
        c = self.config
        settings = self.live.record().settings.changed(c.changes(policy))
        await self.live.switch(settings)
        rate_rps = load * c.saturation_rps
        calls = make_calls(c.shapes, rate_rps, c.duration_s, seed, c.burst, c.length_scale)
        start_s = time.monotonic()
        tasks = []
        for index, call in enumerate(calls):
            await asyncio.sleep(max(0.0, start_s + call.at_s - time.monotonic()))
            tasks.append(asyncio.create_task(_ask(self.live, call, index, start_s + call.at_s, {})))
        results = await asyncio.gather(*tasks)
        return {
            "policy": policy,
            "load": load,
            "seed": seed,
            "burst": c.burst,
            "rate_rps": rate_rps,
            "failed": sum(one.status is not Status.OK for one in results),
        } | kept(
            [c.table.promised(call.service, None) for call in calls],
            [one.token_s for one in results],
            held=policy.startswith("halo"),
            slack_s=JITTER_S,
        )


async def full_iteration_s(live: Live, service: str, batch: int) -> float:
    """Median time between tokens while so many streams run.

    Raises:
        LiveError: a request was not answered.
    """
    changes = {"scheduler": "fcfs", "slots": batch, "token_budget": batch}
    await live.switch(live.record().settings.changed(changes))
    call = Call(0.0, service, 32, _CALIBRATION_TOKENS)
    gaps: list[float] = []
    for _ in range(3):
        now_s = time.monotonic()
        found = await asyncio.gather(*(_ask(live, call, i, now_s, {}) for i in range(batch)))
        if wrong := [one.error for one in found if one.status is not Status.OK]:
            raise LiveError(f"a request to the idle server: {wrong[0]}")
        # The middle of each answer, where all of them run.
        gaps += [float(np.median(np.diff(one.token_s[8:-8]))) for one in found]
    return float(np.median(gaps))


async def _ask(live: Live, call: Call, index: int, at_s: float, xargs: Mapping[str, Any]) -> Result:
    item = Item(call.at_s, RequestClass.T2T, call.prompt_tokens, call.answer_tokens, index)
    return await send(
        live.session,
        live.server,
        item,
        index=index,
        scheduled_s=at_s,
        limit_s=LIMIT_S,
        payload=payload(call, index, xargs),
    )


def payload(call: Call, seed: int, xargs: Mapping[str, Any]) -> dict[str, Any]:
    """The chat request of a call, to the adapter of its service."""
    return {
        "model": call.service or MODEL_NAME,
        "messages": [{"role": "user", "content": prompt(call.prompt_tokens, seed)}],
        "max_tokens": call.answer_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "vllm_xargs": dict(xargs),
    }


def scaled(table: Services, full_s: float) -> Services:
    """The same services with promises as long as this machine's full iteration asks for."""
    factor = full_s / FULL / table.strictest_tbt_s

    def longer(one: Service) -> Service:
        return one.model_copy(
            update={
                "ttft_ms": round(factor * one.ttft_ms, 1),
                "tbt_ms": round(factor * one.tbt_ms, 1),
            }
        )

    services = {name: longer(one) for name, one in table.services.items()}
    return Services(services=services, default=longer(table.default))


def kept(
    promises: Sequence[Promised],
    token_s: Sequence[Sequence[float]],
    held: bool,
    slack_s: float,
) -> dict[str, Any]:
    """How promises were kept; ``token_s``: when each token was there, from its request's arrival.

    ``held``: tokens leave at their release times. ``slack_s``: rounding, which breaks nothing.
    """
    late, firsts, gaps, broken = 0, [], 0, 0
    for promise, left_s in zip(promises, token_s, strict=True):
        if held:
            releases = Releases(Pace(promise.ttft_s, promise.tbt_s, finish=Finish.PACE))
            left_s = [releases.release_s(at_s, 1, finished=False) for at_s in left_s]
        late += not left_s or left_s[0] > promise.ttft_s + slack_s
        firsts.append(left_s[0] / promise.ttft_s if left_s else np.inf)
        between_s = np.diff(left_s)
        gaps += len(between_s)
        broken += int(np.sum(between_s > promise.tbt_s + slack_s))
    return {
        "requests": len(promises),
        "late": late / max(1, len(promises)),
        "broken": broken / max(1, gaps),
        # Between a time and none at all there is nothing to interpolate.
        "p99": float(np.quantile(firsts, 0.99, method="inverted_cdf")) if firsts else 0.0,
    }


async def delivery(
    live: Live, model: str, tbt_ms: float, ttft_ms: float = 1_000.0, streams: int = 4
) -> dict[str, float]:
    """How far delivered tokens are from their promises, with a few streams on an idle server.

    Each stream leaves at its own time; ``first_ms``: how far a first token is from its deadline.
    """
    xargs = {"ttft_ms": ttft_ms, "tbt_ms": tbt_ms}
    call = Call(0.0, model, 32, max(24, round(5_000 / tbt_ms)))

    async def one(index: int) -> Result:
        await asyncio.sleep(index * 0.37 * tbt_ms / 1e3)
        return await _ask(live, call, index, time.monotonic(), xargs)

    found = await asyncio.gather(*(one(index) for index in range(streams)))
    if wrong := [one.error for one in found if one.status is not Status.OK]:
        raise LiveError(f"a request to the idle server: {wrong[0]}")
    gaps_ms = 1e3 * np.concatenate([np.diff(one.token_s) for one in found])
    off_ms = np.abs(gaps_ms - tbt_ms)
    first_ms = [abs(1e3 * one.token_s[0] - ttft_ms) for one in found]
    return {
        "tokens": float(len(gaps_ms)),
        "p50_ms": float(np.quantile(off_ms, 0.5)),
        "p99_ms": float(np.quantile(off_ms, 0.99)),
        "first_ms": float(np.quantile(first_ms, 0.99)),
    }
