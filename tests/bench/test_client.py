"""The client against a small fake of the server: every way to fail ends in a result, in time."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from horizonserve.bench.client import body, open_session, send
from horizonserve.bench.play import Bounds, http_send, play
from horizonserve.bench.result import Result, Status
from horizonserve.bench.server import HOST, Server, free_port
from horizonserve.slo import RequestClass
from horizonserve.workload import Item, Mix, make_trace

TEXT = Item(0.0, RequestClass.T2T, 5, 3, 1)
AUDIO = Item(0.0, RequestClass.T2A, 5, 3, 1)
IMAGE = Item(0.0, RequestClass.T2I, 5, 3, 1)

Script = Callable[[web.StreamResponse], Awaitable[None]]


def chunk(
    content: str | None,
    modality: str = "text",
    finish: str | None = None,
    so_far: int | None = None,
) -> bytes:
    choice = {"index": 0, "delta": {"content": content}, "finish_reason": finish}
    plain: dict[str, Any] = {"choices": [choice], "modality": modality}
    if so_far is not None:
        plain["usage"] = {"completion_tokens": so_far}
    return b"data: " + json.dumps(plain).encode() + b"\n\n"


USAGE = b'data: {"choices": [], "usage": {"completion_tokens": 5}}\n\n'
DONE = b"data: [DONE]\n\n"


def run(script: Script, item: Item = TEXT, limit_s: float = 5.0, late_s: float = 0.0) -> Result:
    """Send one item to a server that answers by ``script``."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await script(response)
        return response

    async def main() -> Result:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        port = free_port()
        await web.TCPSite(runner, HOST, port).start()
        try:
            async with open_session() as session:
                return await send(
                    session,
                    Server(f"http://{HOST}:{port}", Path("none.log"), 0),
                    item,
                    index=0,
                    scheduled_s=time.monotonic() - late_s,
                    limit_s=limit_s,
                )
        finally:
            await runner.cleanup()

    return asyncio.run(asyncio.wait_for(main(), 20.0))


def writes(*parts: bytes, pause_s: float = 0.0) -> Script:
    async def script(response: web.StreamResponse) -> None:
        for part in parts:
            await response.write(part)
            await asyncio.sleep(pause_s)

    return script


def test_text() -> None:
    one = run(
        writes(
            chunk(""), chunk("a"), chunk("b"), chunk("c", finish="length"), USAGE, DONE, pause_s=0.1
        )
    )
    assert one.status is Status.OK, one.error
    # The role chunk is empty and no first token.
    assert one.first_s is not None and 0.09 < one.first_s < 0.25
    assert one.tokens == 5
    # Two chunks of 0.1 s after the first, five tokens: some chunks held several.
    assert one.tpot_s == pytest.approx(0.05, abs=0.03)


def test_every_token_has_the_time_of_its_chunk() -> None:
    one = run(
        writes(
            chunk("", so_far=0),
            chunk("a", so_far=1),
            chunk("bc", so_far=3),
            # A token whose text is not complete yet, then one that completes it.
            chunk("", so_far=4),
            chunk("d", finish="length", so_far=5),
            USAGE,
            DONE,
            pause_s=0.1,
        ),
        late_s=1.0,
    )
    assert one.status is Status.OK and one.tokens == len(one.token_s) == 5
    assert one.first_s == one.token_s[0] > 1.0
    gaps_s = [later - at_s for at_s, later in pairwise(one.token_s)]
    assert gaps_s == pytest.approx([0.1, 0.0, 0.1, 0.1], abs=0.06)
    assert one.token_s[1] == one.token_s[2]
    assert one.tpot_s == pytest.approx(sum(gaps_s) / 4)


def test_a_cut_answer_keeps_the_times_of_its_tokens() -> None:
    parts = (chunk("a", so_far=1), chunk("bc", so_far=3))
    one = run(writes(*parts, pause_s=0.05), limit_s=5.0)
    assert one.status is Status.FAILED and len(one.token_s) == 3


def test_a_server_that_counts_nothing_sends_a_token_a_chunk() -> None:
    one = run(writes(chunk(""), chunk("a"), chunk("b", finish="stop"), DONE))
    assert len(one.token_s) == one.tokens == 2


def test_latency_counts_from_the_schedule() -> None:
    one = run(writes(chunk("a", finish="stop"), DONE), late_s=2.0)
    assert one.first_s is not None and one.first_s > 2.0 and one.late_s >= 2.0


def test_audio_is_answered_by_audio_only() -> None:
    parts = (chunk("a"), chunk("UklGRg", "audio"), chunk("UklG", "audio", "stop"), DONE)
    one = run(writes(*parts, pause_s=0.1), AUDIO)
    assert one.status is Status.OK and one.tpot_s is None and one.token_s == ()
    assert one.first_s is not None and 0.09 < one.first_s < 0.19
    text_only = run(writes(chunk("a", finish="stop"), DONE), AUDIO)
    assert text_only.status is Status.FAILED and "without audio" in text_only.error


def test_an_image_is_answered_when_it_is_whole() -> None:
    one = run(writes(chunk("iVBO", "image", "stop"), DONE, pause_s=0.1), IMAGE)
    assert one.status is Status.OK and one.first_s == pytest.approx(one.end_s, abs=0.05)


def test_a_long_line_in_many_pieces() -> None:
    audio = chunk("A" * 3_000_000, "audio", "stop")
    pieces = [audio[at : at + 700_000] for at in range(0, len(audio), 700_000)]
    assert run(writes(*pieces, DONE), AUDIO).status is Status.OK


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ((), "hung up"),
        ((chunk("a"),), "hung up"),
        ((chunk("a"), DONE), "in the middle"),
        ((DONE,), "without text"),
        ((b"data: {not json\n\n",), "malformed"),
        ((b"data: [1, 2]\n\n",), "malformed"),
        ((b"data: null\n\n",), "malformed"),
        ((b'data: {"choices": 7}\n\n',), "malformed"),
        ((b'data: {"choices": [7]}\n\n', DONE), "malformed"),
        ((b'data: {"error": {"message": "stage 2 is dead"}}\n\n',), "stage 2 is dead"),
        ((b"\xff\xfe\x00", DONE), "hung up|without text"),
    ],
)
def test_broken_streams_fail(parts: tuple[bytes, ...], reason: str) -> None:
    one = run(writes(*parts))
    assert one.status is Status.FAILED
    assert re.search(reason, one.error), one.error


def test_a_hang_up_in_the_middle_of_a_chunk() -> None:
    async def script(response: web.StreamResponse) -> None:
        await response.write(chunk("a")[:10])
        assert response._req is not None and response._req.transport is not None
        response._req.transport.abort()

    assert run(script).status is Status.FAILED


def test_silence_times_out() -> None:
    async def script(response: web.StreamResponse) -> None:
        await response.write(chunk("a"))
        await asyncio.sleep(30)

    one = run(script, limit_s=0.3)
    assert one.status is Status.TIMEOUT and one.end_s < 1.0


def test_a_refusal_says_why() -> None:
    async def main() -> Result:
        async def handler(_: web.Request) -> web.Response:
            return web.json_response({"error": {"message": "max_tokens: too many"}}, status=400)

        app = web.Application()
        app.router.add_post("/v1/chat/completions", handler)
        runner = web.AppRunner(app)
        await runner.setup()
        port = free_port()
        await web.TCPSite(runner, HOST, port).start()
        async with open_session() as session:
            server = Server(f"http://{HOST}:{port}", Path("none.log"), 0)
            now_s = time.monotonic()
            one = await send(session, server, TEXT, index=0, scheduled_s=now_s, limit_s=5)
        await runner.cleanup()
        return one

    one = asyncio.run(main())
    assert one.status is Status.FAILED and "HTTP 400" in one.error and "too many" in one.error


def test_a_dead_server_fails_at_once() -> None:
    async def main() -> list[Result]:
        results: list[Result] = []
        trace = make_trace(Mix(), 50.0, 0.5, 1)
        bounds = Bounds(drain_s=5.0)
        async with open_session() as session:
            server = Server(f"http://{HOST}:{free_port()}", Path("none.log"), 0)
            send_one = http_send(session, server, trace, bounds)
            slo_s = dict.fromkeys(RequestClass, 1.0)
            await play(trace, send_one, slo_s, bounds=bounds, on_result=results.append)
        assert len(results) == len(trace.items)
        return results

    assert {one.status for one in asyncio.run(asyncio.wait_for(main(), 10.0))} == {Status.FAILED}


def test_the_body_says_what_is_wanted() -> None:
    text: dict[str, Any] = body(TEXT)
    assert text["modalities"] == ["text"] and text["max_tokens"] == 3 and text["stream"] is True
    assert len(text["messages"][0]["content"].split()) == 5
    assert body(AUDIO)["modalities"] == ["audio"]


@pytest.mark.parametrize(
    ("item", "kind"),
    [
        (Item(0, RequestClass.A2T, 5, 3, 1, audio_ms=500), "audio_url"),
        (Item(0, RequestClass.I2T, 5, 3, 1, image_px=28), "image_url"),
        (Item(0, RequestClass.V2A, 5, 3, 1, image_px=28, video_frames=2), "video_url"),
    ],
)
def test_media(item: Item, kind: str) -> None:
    pytest.importorskip("torch")
    media, text = body(item)["messages"][0]["content"]
    assert media["type"] == kind and media[kind]["url"].startswith("data:")
    assert text["type"] == "text"
