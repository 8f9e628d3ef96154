"""A running server whose policy is switched between runs, and which is idle when they start."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

from horizonserve import instance
from horizonserve.bench import guard
from horizonserve.bench.client import open_session, send
from horizonserve.bench.result import Result, Status
from horizonserve.bench.server import Server, ServerError
from horizonserve.config import Settings
from horizonserve.slo import RequestClass
from horizonserve.workload import Item

_SWITCH_LIMIT_S: Final = 30.0
_REQUEST_LIMIT_S: Final = 300.0
_NUDGE_LIMIT_S: Final = 60.0
#: Requests that the front end follows. The stages' own gauges keep their last value when a stage
#: goes idle after an abort, so they cannot tell.
_GAUGES: Final = ("vllm_omni:num_requests_running{", "vllm_omni:num_requests_waiting{")
#: Where vLLM-Omni is not there, the engine's are the front end's.
_PLAIN_GAUGES: Final = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
#: One look at the stage processes: so many samples, of which so many may find one at work.
_SAMPLES, _AT_WORK, _SAMPLE_S = 15, 3, 0.1


class LiveError(RuntimeError):
    """The server did not do what was asked of it."""


@dataclass(frozen=True, slots=True)
class Live:
    """A server that answers, and the session to ask it with."""

    server: Server
    session: aiohttp.ClientSession

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, server: Server) -> AsyncIterator[Live]:
        """Talk to a server."""
        async with open_session() as session:
            yield cls(server, session)

    def record(self) -> instance.Instance:
        """The live record of this server's scheduler, whoever else runs one.

        Raises:
            LiveError: it has none.
        """
        for found in instance.live():
            if self.server.owns(found.pid):
                return found
        raise LiveError(
            "the server has no live record; it must be started with --scheduler, and its"
            f" shared stage must be alone (see {self.server.log_file})"
        )

    async def ask(self, item: Item, index: int = 0, limit_s: float = _REQUEST_LIMIT_S) -> Result:
        """Send one request now and wait for its end."""
        now_s = time.monotonic()
        return await send(
            self.session,
            self.server,
            item,
            index=index,
            scheduled_s=now_s,
            limit_s=limit_s,
        )

    async def nudge(self) -> None:
        """One tiny request, so that the scheduler takes a step.

        Raises:
            LiveError: it was not answered.
        """
        item = Item(0.0, RequestClass.T2T, 4, 2, 0)
        result = (await self.ask(item, limit_s=_NUDGE_LIMIT_S)).not_cut()
        if result.status is not Status.OK:
            raise LiveError(f"a request of two tokens to the idle server: {result.error}")

    async def switch(self, settings: Settings) -> None:
        """Run under these settings from now on; returns when the scheduler confirmed.

        Raises:
            LiveError: it did not confirm, or refused.
        """
        # An idle scheduler takes no step: it confirms with the request that follows.
        try:
            instance.request(self.record(), settings, wait_s=0.0)
        except instance.InstanceError as error:
            raise LiveError(str(error)) from error
        until_s = time.monotonic() + _SWITCH_LIMIT_S
        while time.monotonic() < until_s:
            await self.nudge()
            found = self.record()
            if found.applied and found.settings == settings:
                return
        raise LiveError(f"the scheduler did not confirm new settings in {_SWITCH_LIMIT_S:.0f} s")

    async def idle(self, limit_s: float = 120.0) -> float:
        """Wait until nothing is left in any stage; the seconds it took.

        Aborted requests leave the stages one after another, and a stage finishes the step it is
        in, so the next run must not start before they have: the front end must follow no request
        and the stage processes must sleep.

        Raises:
            LiveError: still busy after ``limit_s``.
        """
        start_s = time.monotonic()
        while await self.in_flight() or await self._at_work():
            if time.monotonic() - start_s > limit_s:
                raise LiveError(f"the server is still at work after {limit_s:.0f} s without load")
        return time.monotonic() - start_s

    async def _at_work(self) -> bool:
        """Whether a stage process computes; it is runnable then, even on a crowded machine."""
        found = 0
        for _ in range(_SAMPLES):
            await asyncio.sleep(_SAMPLE_S)
            found += any(guard.is_runnable(pid) for pid in self.server.stages())
        return found > _AT_WORK

    async def in_flight(self) -> float:
        """Requests that the front end follows, running or waiting.

        Raises:
            ServerError: the server does not answer.
        """
        try:
            async with self.session.get(
                f"{self.server.url}/metrics", timeout=aiohttp.ClientTimeout(total=20)
            ) as response:
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ServerError(f"{self.server.url}/metrics: {error!r}") from error
        every = text.splitlines()
        lines = [line for line in every if line.startswith(_GAUGES)]
        lines = lines or [line for line in every if line.startswith(_PLAIN_GAUGES)]
        if not lines:
            raise ServerError(f"{self.server.url}/metrics: has none of {', '.join(_GAUGES)}")
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def slo_changes(slo_ms: dict[RequestClass, float]) -> dict[str, Any]:
    """Targets per class, as settings."""
    return {f"slo_{name.value}_ms": round(value, 1) for name, value in slo_ms.items()}
