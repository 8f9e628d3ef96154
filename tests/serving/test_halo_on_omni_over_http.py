"""HALO on the shared stage of a real vLLM-Omni server: text beside speech, over HTTP."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from delivered import assert_left_as_promised, at_once, counted

from horizonserve import instance
from horizonserve.bench.boot import booted
from horizonserve.bench.client import body, open_session
from horizonserve.bench.compare import Watch
from horizonserve.bench.result import Result, Status
from horizonserve.bench.server import Server
from horizonserve.slo import RequestClass
from horizonserve.workload import Item

pytestmark = [pytest.mark.server, pytest.mark.vllm, pytest.mark.timeout(600)]
TABLE = Path(__file__).parents[2] / "configs" / "services" / "hospital.yaml"
SPEECH = Item(0.0, RequestClass.T2A, 8, 24, 1)


@pytest.fixture(scope="module")
def server(
    tiny_model: Path, tiny_deploy: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    pytest.importorskip("vllm_omni")
    env = {"HORIZON_SERVICES": str(TABLE), "HORIZON_ON_FINISH": "pace"}
    log = tmp_path_factory.mktemp("halo-omni") / "server.log"
    with booted(tiny_model, tiny_deploy, log, Watch(), scheduler="halo", env=env) as one:
        yield one


def text(tokens: int = 8) -> Item:
    return Item(0.0, RequestClass.T2T, 8, tokens, 1)


def streamed(server: Server, *requests: tuple[Item, dict[str, Any]]) -> list[Result]:
    """Answers to requests sent at once, each with its hints."""
    bodies = [(item, body(item) | {"vllm_xargs": hints}) for item, hints in requests]
    return at_once(server, *bodies, limit_s=120.0)


def test_text_leaves_as_promised_and_speech_passes(server: Server) -> None:
    slow, fast, service, *speech = streamed(
        server,
        (text(6), {"ttft_ms": 900, "tbt_ms": 200}),
        (text(12), {"ttft_ms": 600, "tbt_ms": 80}),
        (text(6), {"service": "record-generation"}),
        (SPEECH, {}),
        (SPEECH, {}),
    )
    for found, ttft_s, tbt_s in ((slow, 0.9, 0.2), (fast, 0.6, 0.08), (service, 1.0, 0.05)):
        assert_left_as_promised(found, ttft_s, tbt_s)
    assert [found.status for found in speech] == [Status.OK] * 2, speech


@pytest.mark.parametrize(
    ("hints", "says"),
    [
        ({"ttft_ms": 0}, "ttft_ms=0"),
        ({"ttft_ms": "nan"}, "ttft_ms='nan'"),
        ({"tbt_ms": "x"}, "tbt_ms='x'"),
        ({"service": "surgery"}, "service='surgery'"),
    ],
)
def test_a_malformed_promise_is_a_400(server: Server, hints: dict[str, Any], says: str) -> None:
    (found,) = streamed(server, (text(), hints))
    assert found.status is Status.FAILED
    assert found.error.startswith("HTTP 400") and says in found.error.replace("\\", "")


def test_delivered_times_are_counted_per_service(server: Server) -> None:
    streamed(server, (text(4), {"service": "pre-assessment"}))
    assert counted(server, "ttft", "pre-assessment") == 1
    assert counted(server, "tbt", "pre-assessment") == 3


def test_clients_that_hang_up_leave_nothing_running(server: Server) -> None:
    async def hang_up(session: aiohttp.ClientSession, index: int) -> None:
        item = SPEECH if index % 4 == 0 else text(64)
        request = body(item) | {"vllm_xargs": {"ttft_ms": 300, "tbt_ms": 200}}
        headers = {"X-Request-Id": f"{server.name}-{secrets.token_hex(8)}"}
        url = f"{server.url}/v1/chat/completions"
        try:
            async with (
                asyncio.timeout(0.1 * index),
                session.post(url, json=request, headers=headers) as response,
            ):
                async for _ in response.content:
                    pass
        except TimeoutError:
            pass

    async def main() -> None:
        async with open_session() as session:
            await asyncio.gather(*(hang_up(session, index) for index in range(24)))

    asyncio.run(main())
    until_s = time.monotonic() + 30
    while True:
        (found,) = streamed(server, (text(1), {}))  # an idle scheduler publishes nothing
        assert found.status is Status.OK
        (own,) = [one for one in instance.live() if server.owns(one.pid)]
        if own.counters.running + own.counters.waiting <= 1:
            return
        assert time.monotonic() < until_s, own.counters
