"""HALO on a real `vllm serve` with four adapters: what is refused, and when tokens leave."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from delivered import assert_left_as_promised, at_once, counted

from horizonserve import instance
from horizonserve.bench.client import open_session
from horizonserve.bench.plain import served
from horizonserve.bench.result import Result, Status
from horizonserve.bench.server import Server
from horizonserve.bench.services_study import payload
from horizonserve.slo import RequestClass
from horizonserve.workload import Item
from horizonserve.workload.services import Call

pytestmark = [
    pytest.mark.server,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]
TABLE = Path(__file__).parents[2] / "configs" / "services" / "hospital.yaml"
SERVICE = "record-generation"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pytest.importorskip("vllm")
    from horizonserve.models import make_model
    from horizonserve.models.llama_lora import ADAPTERS, SERVICES

    work = tmp_path_factory.mktemp("halo")
    model = make_model("llama-lora", "tiny", work / "model")
    env = {
        "HORIZON_SERVICES": str(TABLE),
        "HORIZON_ON_FINISH": "pace",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    extra = ["--max-num-seqs", "16", "--max-num-batched-tokens", "256", "--enforce-eager"]
    adapters = {name: model / ADAPTERS / name for name in SERVICES}
    log = work / "server.log"
    with served(model, adapters, log, scheduler="halo", extra=extra, env=env) as one:
        yield one


def call(xargs: dict[str, Any], tokens: int = 8, model: str = SERVICE) -> dict[str, Any]:
    return payload(Call(0.0, model, 16, tokens), 1, xargs)


def post(server: Server, request: dict[str, Any]) -> tuple[int, str]:
    """Status and text of an answer that does not stream."""
    request = {k: v for k, v in request.items() if k != "stream_options"} | {"stream": False}
    headers = {"Content-Type": "application/json"}
    url = f"{server.url}/v1/chat/completions"
    ask = urllib.request.Request(url, json.dumps(request).encode(), headers)
    try:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(ask, timeout=120) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def streamed(server: Server, *requests: dict[str, Any]) -> list[Result]:
    items = [Item(0.0, RequestClass.T2T, 16, one["max_tokens"], 1) for one in requests]
    return at_once(server, *zip(items, requests, strict=True), limit_s=60.0)


def test_it_says_what_it_runs(server: Server) -> None:
    (own,) = [one for one in instance.live() if server.owns(one.pid)]
    assert own.settings.scheduler == "halo" and own.settings.services == str(TABLE)


@pytest.mark.parametrize(
    ("xargs", "says"),
    [
        ({"ttft_ms": 0}, "ttft_ms=0"),
        ({"ttft_ms": -1}, "ttft_ms=-1"),
        ({"ttft_ms": "nan"}, "ttft_ms='nan'"),
        ({"tbt_ms": "x"}, "tbt_ms='x'"),
        ({"ttft_ms": 100, "slo_ms": 100}, "ttft_ms=100"),
        ({"service": "surgery"}, "service='surgery'"),
        ({"service": 3}, "service=3"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_malformed_promise_is_a_400(
    server: Server, xargs: dict[str, Any], says: str, stream: bool
) -> None:
    if stream:
        (found,) = streamed(server, call(xargs))
        assert found.status is Status.FAILED
        assert found.error.startswith("HTTP 400") and says in found.error.replace("\\", "")
    else:
        status, text = post(server, call(xargs))
        assert status == 400 and says in text.replace("\\", "")
    assert post(server, call({}))[0] == 200


def test_an_adapter_that_is_not_loaded_is_no_request(server: Server) -> None:
    assert post(server, call({}, model="surgery"))[0] == 404


def test_streams_are_paced_to_their_own_promises_and_other_answers_are_not(
    server: Server,
) -> None:
    slow, fast, service = streamed(
        server,
        call({"ttft_ms": 700, "tbt_ms": 150}, tokens=6),
        call({"ttft_ms": 400, "tbt_ms": 40}, tokens=12),
        call({}, tokens=6),
    )
    for found, ttft_s, tbt_s in ((slow, 0.7, 0.15), (fast, 0.4, 0.04), (service, 1.0, 0.05)):
        assert_left_as_promised(found, ttft_s, tbt_s)
    started_s = time.monotonic()
    assert post(server, call({"ttft_ms": 5_000}, tokens=2))[0] == 200
    assert time.monotonic() - started_s < 2.0


def test_tokens_are_those_of_the_answer_that_is_not_paced(server: Server) -> None:
    async def text() -> str:
        async with open_session() as session:
            url = f"{server.url}/v1/chat/completions"
            async with session.post(url, json=call({"ttft_ms": 200, "tbt_ms": 20})) as response:
                lines = (await response.text()).splitlines()
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        return "".join(
            choice["delta"].get("content") or "" for one in chunks for choice in one["choices"]
        )

    _, whole = post(server, call({}))
    assert asyncio.run(text()) == json.loads(whole)["choices"][0]["message"]["content"]


def test_delivered_times_are_counted_per_service(server: Server) -> None:
    streamed(server, call({}, tokens=4))
    assert counted(server, "ttft", SERVICE) >= 1
    assert counted(server, "tbt", SERVICE) >= 1


def test_clients_that_hang_up_leave_nothing_running(server: Server) -> None:
    async def main() -> None:
        async def hang_up(session: aiohttp.ClientSession, after_s: float) -> None:
            request = call({"ttft_ms": 300, "tbt_ms": 200}, tokens=64)
            url = f"{server.url}/v1/chat/completions"
            try:
                async with (
                    asyncio.timeout(after_s),
                    session.post(url, json=request) as response,
                ):
                    async for _ in response.content:
                        pass
            except TimeoutError:
                pass

        async with open_session() as session:
            await asyncio.gather(*(hang_up(session, 0.05 * index) for index in range(30)))

    asyncio.run(main())
    until_s = time.monotonic() + 30
    while True:
        assert post(server, call({}, tokens=1))[0] == 200
        (own,) = [one for one in instance.live() if server.owns(one.pid)]
        if own.counters.running + own.counters.waiting <= 1:
            return
        assert time.monotonic() < until_s, own.counters
