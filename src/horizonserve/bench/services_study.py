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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from horizonserve.bench.client import send
from horizonserve.bench.live import Live, LiveError
from horizonserve.bench.result import Result, Status
from horizonserve.bench.server import MODEL_NAME
from horizonserve.services import Promised, Services
from horizonserve.shaper import Finish, Pace, Releases
from horizonserve.slo import RequestClass
from horizonserve.workload import Item
from horizonserve.workload.prompt import prompt
from horizonserve.workload.services import Call, Shape, make_calls

#: What B's iteration takes, as a share of the strictest TBT that it was chosen for.
FULL: Final = 46 / 50
LIMIT_S: Final = 120.0
#: Tokens of the chat template around a prompt.
_TEMPLATE_TOKENS: Final = 7
_CALIBRATION_TOKENS: Final = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicesConfig:
    """Everything that decides the figures."""

    table: Services
    shapes: Mapping[str, Shape]
    batch: int = 16
    policies: tuple[str, ...] = ("fcfs", "vtc-t", "vtc-r", "qoserve-static", "qoserve", "halo")
    loads: tuple[float, ...] = (1.0,)
    seeds: tuple[int, ...] = (1, 2, 3)
    duration_s: float = 60.0
    burst: bool = False
    #: Of all lengths, so that a run has enough requests.
    length_scale: float = 0.2

    def changes(self, policy: str) -> dict[str, Any]:
        """Settings of a policy: B, and for all but HALO as many slots."""
        more = {"token_budget": self.batch}
        if policy == "halo-dynamic":
            return {"scheduler": "halo", "dynamic_budget": True, "token_budget": None}
        if policy == "halo":
            return {"scheduler": "halo", **more, "dynamic_budget": False, "slots": None}
        return {"scheduler": policy, **more, "slots": self.batch}


@dataclass(frozen=True, slots=True)
class Scale:
    """What follows from the time of a full iteration."""

    full_s: float
    promises: float
    saturation_rps: float
    table: Services = field(repr=False)


@dataclass(slots=True)
class ServicesStudy:
    """Plays it; each run is written as it ends."""

    config: ServicesConfig
    live: Live
    out: Path

    async def run(self, say: Any = lambda _words: None) -> list[dict[str, Any]]:
        """Every run that is missing; all runs.

        Raises:
            LiveError: the server did not do what was asked of it.
        """
        c = self.config
        await self.live.switch(self.live.record().settings.changed(c.changes("fcfs")))
        scale = await self.scale()
        say(f"a full iteration takes {1e3 * scale.full_s:.0f} ms")
        runs = self._stored()
        done = {(run["policy"], run["load"], run["seed"]) for run in runs}
        for seed in c.seeds:
            for load in c.loads:
                for policy in c.policies:
                    if (policy, load, seed) in done:
                        continue
                    say(f"{policy}, {load:g}x, seed {seed}")
                    run = await self._run(policy, load, seed, scale)
                    runs.append(run)
                    with self._file.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(run) + "\n")
        return runs

    @property
    def _file(self) -> Path:
        return self.out / "runs.jsonl"

    def _stored(self) -> list[dict[str, Any]]:
        if not self._file.exists():
            return []
        return [json.loads(line) for line in self._file.read_text(encoding="utf-8").splitlines()]

    async def scale(self) -> Scale:
        """Measure B's iteration, or read what was measured when the study began."""
        note = self.out / "scale.json"
        if note.exists():
            full_s = float(json.loads(note.read_text(encoding="utf-8"))["full_s"])
        else:
            full_s = await self._full_s()
            note.write_text(json.dumps({"full_s": full_s}) + "\n", encoding="utf-8")
        c = self.config
        calls = make_calls(c.shapes, 1.0, 2_000.0, 0, scale=c.length_scale)
        tokens = np.mean(
            [_TEMPLATE_TOKENS + one.prompt_tokens + one.answer_tokens for one in calls]
        )
        factor = full_s / FULL / c.table.strictest_tbt_s
        return Scale(full_s, factor, c.batch / full_s / float(tokens), scaled(c.table, factor))

    async def _full_s(self) -> float:
        """Median time between tokens while B streams run."""
        call = Call(0.0, next(iter(self.config.shapes)), 32, _CALIBRATION_TOKENS)
        gaps: list[float] = []
        for _ in range(3):
            now_s = time.monotonic()
            found = await asyncio.gather(
                *(self._send(call, i, now_s, {}) for i in range(self.config.batch))
            )
            if wrong := [one.error for one in found if one.status is not Status.OK]:
                raise LiveError(f"a request to the idle server: {wrong[0]}")
            # The middle of each answer, where all of them run.
            gaps += [float(np.median(np.diff(one.token_s[8:-8]))) for one in found]
        return float(np.median(gaps))

    async def _run(self, policy: str, load: float, seed: int, scale: Scale) -> dict[str, Any]:
        c = self.config
        settings = self.live.record().settings.changed(c.changes(policy))
        await self.live.switch(settings)
        rate_rps = load * scale.saturation_rps
        calls = make_calls(c.shapes, rate_rps, c.duration_s, seed, c.burst, c.length_scale)
        start_s = time.monotonic()
        tasks = []
        for index, call in enumerate(calls):
            await asyncio.sleep(max(0.0, start_s + call.at_s - time.monotonic()))
            promise = scale.table.promised(call.service, None)
            xargs = {
                "ttft_ms": 1e3 * promise.ttft_s,
                "tbt_ms": 1e3 * promise.tbt_s,
                "service": call.service,
            }
            at_s = start_s + call.at_s
            tasks.append(asyncio.create_task(self._send(call, index, at_s, xargs)))
        results = await asyncio.gather(*tasks)
        return {
            "policy": policy,
            "load": load,
            "seed": seed,
            "burst": c.burst,
            "rate_rps": rate_rps,
            "failed": sum(one.status is not Status.OK for one in results),
        } | kept(
            [scale.table.promised(call.service, None) for call in calls],
            [one.token_s for one in results],
            held=policy.startswith("halo"),
        )

    async def _send(self, call: Call, index: int, at_s: float, xargs: Mapping[str, Any]) -> Result:
        item = Item(call.at_s, RequestClass.T2T, call.prompt_tokens, call.answer_tokens, index)
        return await send(
            self.live.session,
            self.live.server,
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


def scaled(table: Services, factor: float) -> Services:
    """The same services with every promise ``factor`` times as long."""
    services = {
        name: one.model_copy(
            update={"ttft_ms": factor * one.ttft_ms, "tbt_ms": factor * one.tbt_ms}
        )
        for name, one in table.services.items()
    }
    return table.model_copy(update={"services": services})


def kept(
    promises: Sequence[Promised],
    token_s: Sequence[Sequence[float]],
    held: bool,
    slack_s: float = 1e-3,
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
        "p99": float(np.quantile(firsts, 0.99)) if firsts else 0.0,
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
        return await send(
            live.session,
            live.server,
            Item(0.0, RequestClass.T2T, call.prompt_tokens, call.answer_tokens, index),
            index=index,
            scheduled_s=time.monotonic(),
            limit_s=LIMIT_S,
            payload=payload(call, index, xargs),
        )

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
