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
from horizonserve.config import Settings
from horizonserve.instance import Record


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
            for finish in (None, "stop"):
                choice = {"delta": {"content": "x"}, "finish_reason": finish}
                data = json.dumps({"choices": [choice], "modality": modality})
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
