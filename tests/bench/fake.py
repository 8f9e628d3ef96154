"""A small stand-in for the server and its live record, for the harness's own logic."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

from aiohttp import web

from horizonserve.bench.client import open_session
from horizonserve.bench.live import Live
from horizonserve.bench.server import HOST, Server, free_port
from horizonserve.bench.summary import ALL, Row
from horizonserve.config import Settings
from horizonserve.instance import Record

#: Figures of an arm, for what reads them.
ROW = Row(
    experiment="demo",
    rate_rps=1.5,
    arm="default",
    request_class=ALL,
    runs=1,
    requests=100,
    attainment=0.1,
    attainment_low=0.05,
    attainment_high=0.2,
    both=0.08,
    both_low=0.04,
    both_high=0.15,
    at_once=0.07,
    at_once_low=0.03,
    at_once_high=0.14,
    completed_attainment=0.2,
    failed=0,
    timed_out=0,
    undecided=0,
    first_p50_s=1.0,
    first_p95_s=12.0,
    first_p95_low_s=11.0,
    first_p95_high_s=13.5,
    tpot_p50_ms=40.0,
    tpot_p95_ms=80.0,
    gap_p95_ms=95.0,
    slo_ms=None,
    tbt_ms=None,
)


class OwnServer(Server):
    """A server whose scheduler is this process."""

    def owns(self, pid: int) -> bool:
        return pid == os.getpid()

    def stages(self) -> list[int]:
        return []


class Fake:
    """Answers chat requests after a moment and polls its record as a scheduler does."""

    def __init__(self) -> None:
        self.record = Record(Settings(slots=4), {"model": "fake"})
        self.settings = Settings(slots=4)
        self.answers_under: list[str] = []
        self.in_flight = 0
        self.takes_s = 0.01
        self.gap_s = 0.005
        self.obeys = True

    async def chat(self, request: web.Request) -> web.StreamResponse:
        content = await request.json()
        if self.obeys and (changed := self.record.poll()) is not None:
            self.settings = changed
        self.answers_under.append(self.settings.scheduler)
        self.in_flight += 1
        try:
            await asyncio.sleep(self.takes_s)
            response = web.StreamResponse()
            await response.prepare(request)
            modality = content["modalities"][0]
            for tokens, finish in ((1, None), (2, "stop")):
                await asyncio.sleep(self.gap_s * (tokens - 1))
                choice = {"delta": {"content": "x"}, "finish_reason": finish}
                usage = {"completion_tokens": tokens if modality == "text" else 0}
                data = json.dumps({"choices": [choice], "modality": modality, "usage": usage})
                await response.write(f"data: {data}\n\n".encode())
            await response.write(b"data: [DONE]\n\n")
            return response
        finally:
            self.in_flight -= 1

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(
            text="# HELP x\n"
            f'vllm_omni:num_requests_running{{x="0"}} {float(self.in_flight)}\n'
            'vllm_omni:num_requests_waiting{x="0"} 0.0\n'
        )


@contextlib.asynccontextmanager
async def live(fake: Fake) -> AsyncIterator[Live]:
    """The fake over HTTP."""
    app = web.Application()
    app.router.add_post("/v1/chat/completions", fake.chat)
    app.router.add_get("/metrics", fake.metrics)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, HOST, port).start()
    try:
        async with open_session() as session:
            server = OwnServer(f"http://{HOST}:{port}", Path("none.log"), os.getpid())
            yield Live(server, session)
    finally:
        await runner.cleanup()
        fake.record.close()
