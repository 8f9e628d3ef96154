"""What clients of a server that paces must see."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from itertools import pairwise
from typing import Any

import aiohttp

from horizonserve.bench.client import open_session, send
from horizonserve.bench.result import Result, Status
from horizonserve.bench.server import Server
from horizonserve.workload import Item


def at_once(server: Server, *requests: tuple[Item, dict[str, Any]], limit_s: float) -> list[Result]:
    """Streamed answers to requests sent at once, each with its body."""

    async def one(session: aiohttp.ClientSession, index: int) -> Result:
        item, payload = requests[index]
        return await send(
            session,
            server,
            item,
            index=index,
            scheduled_s=time.monotonic(),
            limit_s=limit_s,
            payload=payload,
        )

    async def main() -> list[Result]:
        async with open_session() as session:
            return await asyncio.gather(*(one(session, i) for i in range(len(requests))))

    return asyncio.run(main())


def assert_left_as_promised(found: Result, ttft_s: float, tbt_s: float) -> None:
    """Not before it was promised, and soon after even on a machine that does other things."""
    assert found.status is Status.OK, found
    assert ttft_s - 0.01 <= found.token_s[0] <= ttft_s + 1.0
    gaps_s = [after - before for before, after in pairwise(found.token_s)]
    assert len(gaps_s) == found.tokens - 1
    assert 0.9 * tbt_s <= sum(gaps_s) / len(gaps_s) <= 2 * tbt_s


def counted(server: Server, name: str, service: str) -> float:
    """How many delivered times of that kind, ``ttft`` or ``tbt``, the server has counted."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(f"{server.url}/metrics", timeout=20) as response:
        lines = response.read().decode().splitlines()
    start = f'horizonserve:delivered_{name}_seconds_count{{service="{service}"}}'
    (line,) = [line for line in lines if line.startswith(start)]
    return float(line.rsplit(" ", 1)[1])
