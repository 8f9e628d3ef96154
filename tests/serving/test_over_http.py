"""The plugin on the real server with the tiny model, over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
import signal
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from horizonserve import instance
from horizonserve.bench.boot import booted
from horizonserve.bench.client import body
from horizonserve.bench.compare import Watch
from horizonserve.bench.server import MODEL_NAME, Server
from horizonserve.config import Settings
from horizonserve.slo import RequestClass
from horizonserve.spatial.report import report
from horizonserve.workload import Item

pytestmark = [pytest.mark.server, pytest.mark.vllm, pytest.mark.timeout(900)]


def found(server: Server) -> instance.Instance:
    (own,) = [one for one in instance.live() if server.owns(one.pid)]
    return own


def chat(output: str = "text", **fields: Any) -> dict[str, Any]:
    return {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": "the quick brown fox"}],
        "modalities": [output],
        "max_tokens": 4,
        **fields,
    }


def name(server: Server) -> dict[str, str]:
    """Headers that name a request, so that the guard knows what vLLM-Omni leaves of it."""
    return {"X-Request-Id": f"{server.name}-{secrets.token_hex(8)}"}


async def post(
    server: Server, session: aiohttp.ClientSession, request: dict[str, Any]
) -> tuple[int, Any]:
    url = "/v1/chat/completions"
    async with session.post(url, json=request, headers=name(server)) as response:
        return response.status, await response.json(content_type=None)


def ask(server: Server, *requests: dict[str, Any]) -> list[tuple[int, Any]]:
    """Answers to requests sent at once."""

    async def main() -> list[tuple[int, Any]]:
        limit = aiohttp.ClientTimeout(total=300)
        async with aiohttp.ClientSession(server.url, timeout=limit, trust_env=False) as session:
            return await asyncio.gather(*(post(server, session, request) for request in requests))

    return asyncio.run(main())


def assert_serves(server: Server) -> None:
    (text, spoken) = ask(server, chat(), chat("audio"))
    assert text[0] == spoken[0] == 200
    assert text[1]["choices"][0]["message"]["content"]
    assert spoken[1]["choices"][0]["message"]["audio"]["data"]


def test_text_and_speech_come_back(server: Server) -> None:
    assert_serves(server)


def test_one_line_says_what_runs_and_where_each_slo_came_from(server: Server) -> None:
    lines = [line for line in server.log_file.read_text().splitlines() if "HorizonServe 0" in line]
    assert len(lines) == 1
    for part in ("policy horizon", "stage 0", "4 slots", "t2a 10000 ms (built-in default)"):
        assert part in lines[0]


def first_responses(server: Server) -> list[str]:
    """Class of each first response that the shared stage has learned from."""
    (log,) = server.log_file.parent.glob("steps-*.jsonl")
    # The last line may be half written.
    entries = [json.loads(line) for line in log.read_text().rpartition("\n")[0].splitlines()]
    answers = [entry for entry in entries if "actual_s" in entry]
    assert all(0 < entry["actual_s"] < 300 and entry["estimate_s"] > 0 for entry in answers)
    return [entry["class"] for entry in answers]


def test_the_shared_stage_learns_of_first_responses_downstream(server: Server) -> None:
    before = first_responses(server).count("t2a")
    ask(server, chat("audio"), chat("audio"), chat())
    until_s = time.monotonic() + 60
    while first_responses(server).count("t2a") < before + 2:
        assert time.monotonic() < until_s
        ask(server, chat())  # word is read at the next step
        time.sleep(0.5)
    assert "t2t" in first_responses(server)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vllm_xargs": {"slo_ms": -5}}, "slo_ms=-5"),
        ({"vllm_xargs": {"slo_ms": "soon"}, "stream": True}, "slo_ms='soon'"),
        ({"vllm_xargs": {"slo_class": "text"}}, "slo_class='text'"),
        ({"sampling_params_list": [{"extra_args": {"slo_ms": 0}}, {}, {}]}, "slo_ms=0"),
        ({"priority": "high"}, "priority"),
    ],
)
def test_a_malformed_hint_is_a_400_with_the_fields_name(
    server: Server, fields: dict[str, Any], message: str
) -> None:
    ((status, answer),) = ask(server, chat(**fields))
    assert status == 400
    assert message in answer["error"]["message"]


def test_hints_are_taken(server: Server) -> None:
    hints = {"slo_ms": 300, "slo_class": "i2t", "other": "kept"}
    answers = ask(
        server,
        chat(vllm_xargs=hints),
        chat(priority=10),
        chat(priority=0),
        chat(sampling_params_list=[{"max_tokens": 3, "extra_args": {"slo_ms": 99.5}}, {}, {}]),
    )
    assert [status for status, _ in answers] == [200] * 4


@pytest.mark.parametrize("request_class", ["i2t", "a2t", "v2t", "a2a", "i2a", "v2a"])
def test_pictures_sound_and_video_are_taken(server: Server, request_class: str) -> None:
    has = request_class[0]
    item = Item(
        0.0,
        RequestClass(request_class),
        8,
        4,
        1,
        audio_ms=500 if has == "a" else 0,
        image_px=56 if has in "iv" else 0,
        video_frames=4 if has == "v" else 0,
    )
    request = body(item) | {"stream": False}
    request.pop("stream_options")
    ((status, answer),) = ask(server, request)
    assert status == 200, answer


def test_policies_slots_and_budget_change_under_load_without_losing_a_request(
    server: Server,
) -> None:
    async def main() -> list[tuple[int, Any]]:
        limit = aiohttp.ClientTimeout(total=300)
        async with aiohttp.ClientSession(server.url, timeout=limit, trust_env=False) as session:
            rng = random.Random(5)
            requests = [
                chat("audio" if n % 5 == 0 else "text", max_tokens=rng.randint(4, 40))
                for n in range(60)
            ]
            tasks = [asyncio.create_task(post(server, session, request)) for request in requests]
            for number in range(24):
                one = found(server)
                changes = {
                    "scheduler": ("default", "edf", "horizon")[number % 3],
                    "slots": rng.randint(1, 4),
                    "token_budget": rng.choice([64, 256, 2048]),
                    "lost": rng.choice(["demote", "protect"]),
                }
                wanted = one.settings.changed(changes)
                await asyncio.to_thread(instance.request, one, wanted, 5.0)
                await asyncio.sleep(0.2)
            return await asyncio.gather(*tasks)

    answers = asyncio.run(main())
    assert [status for status, _ in answers] == [200] * 60
    one = found(server)
    instance.request(one, one.settings.changed({"scheduler": "horizon", "slots": 4}), wait_s=0)
    assert_serves(server)
    assert found(server).applied


async def spatial(server: Server) -> dict[str, Any]:
    """What the record says and where the threads are.

    A stage says which level it takes and then moves, so the two may differ for a moment.
    """
    one = found(server)
    until_s = time.monotonic() + 5
    while True:
        said = report(one.identity["spatial"], one.settings)
        for stage in said["stages"].values():
            stage["cores"] = os.sched_getaffinity(stage["pid"])
        if time.monotonic() > until_s or all(
            len(stage["cores"]) == (stage["level"][index != "0"] or stage["level"][0])
            for index, stage in said["stages"].items()
            if stage["level"]
        ):
            return said
        await asyncio.sleep(0.005)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core cannot be split")
def test_spatial_control_caps_both_sides_and_can_be_switched_off(server: Server) -> None:
    every = os.sched_getaffinity(0)

    async def main(settings: Settings) -> list[dict[str, Any]]:
        """What the record says while speech is made beside text."""
        limit = aiohttp.ClientTimeout(total=300)
        async with aiohttp.ClientSession(server.url, timeout=limit, trust_env=False) as session:
            await asyncio.to_thread(instance.request, found(server), settings, 0)
            long = [asyncio.create_task(post(server, session, chat("audio"))) for _ in range(4)]
            seen = []
            while not all(task.done() for task in long):
                status, _ = await post(server, session, chat(max_tokens=2))
                assert status == 200
                seen.append(await spatial(server))
            assert [status for status, _ in await asyncio.gather(*long)] == [200] * 4
            return seen

    settings = found(server).settings.changed({"scheduler": "horizon"})
    seen = asyncio.run(main(settings.changed({"spatial": True})))
    assert {said["state"] for said in seen} == {"on"}
    capped = [said for said in seen if said["stages"]["0"]["level"] != [len(every), 0]]
    assert capped
    # A stage that took its last step before the level changed is where it was.
    assert any(said["stages"]["1"]["level"] == said["stages"]["0"]["level"] for said in capped)
    for said in capped:
        for index, stage in said["stages"].items():
            if stage["level"] and stage["level"][1]:
                assert len(stage["cores"]) == stage["level"][index != "0"]
    both = [
        (said["stages"]["0"]["cores"], said["stages"]["1"]["cores"])
        for said in capped
        if said["stages"]["1"]["level"] == said["stages"]["0"]["level"]
    ]
    assert all(not mine & theirs and mine | theirs == every for mine, theirs in both)

    seen = asyncio.run(main(settings.changed({"spatial": False})))
    assert {said["state"] for said in seen} == {"off"}
    assert all(said["stages"]["0"]["cores"] == every for said in seen[1:])
    instance.request(found(server), settings, wait_s=0)


def test_two_hundred_clients_that_hang_up_leave_nothing_running(server: Server) -> None:
    async def client(session: aiohttp.ClientSession, rng: random.Random) -> None:
        request = chat(rng.choice(["text", "text", "audio"]), stream=True, max_tokens=30)
        await asyncio.sleep(rng.uniform(0, 10))
        try:
            async with asyncio.timeout(rng.uniform(0.01, 3)):
                url = "/v1/chat/completions"
                async with session.post(url, json=request, headers=name(server)) as response:
                    async for _ in response.content:
                        pass
        except (TimeoutError, aiohttp.ClientError):
            pass

    async def main() -> None:
        rng = random.Random(7)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            server.url, connector=connector, trust_env=False
        ) as session:
            await asyncio.gather(*(client(session, rng) for _ in range(200)))

    asyncio.run(main())
    assert_serves(server)
    until_s = time.monotonic() + 60
    while (now := found(server).counters).running or now.waiting:
        assert time.monotonic() < until_s, now
        time.sleep(0.5)
        ask(server, chat())  # an idle scheduler publishes nothing


def test_a_killed_stage_gives_errors_and_the_next_start_is_clean(
    server: Server, tiny_model: Path, tiny_deploy: Path, tmp_path: Path
) -> None:
    """Last, because it takes the shared server down."""
    dead = found(server)

    async def main() -> list[Any]:
        limit = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(server.url, timeout=limit, trust_env=False) as session:
            requests = [chat("audio" if n % 3 == 0 else "text", max_tokens=200) for n in range(12)]
            tasks = [asyncio.create_task(post(server, session, request)) for request in requests]
            await asyncio.sleep(1.0)
            os.kill(dead.pid, signal.SIGKILL)
            return await asyncio.gather(*tasks, return_exceptions=True)

    began_s = time.monotonic()
    answers = asyncio.run(main())
    assert time.monotonic() - began_s < 100, "errors, not silence"
    broken = [a for a in answers if isinstance(a, aiohttp.ClientError) or a[0] >= 500]
    assert len(broken) >= 8, answers
    assert dead.pid not in [one.pid for one in instance.live()]
    with booted(
        tiny_model, tiny_deploy, tmp_path / "server.log", Watch(), scheduler="edf"
    ) as again:
        assert not dead.path.exists()
        assert found(again).settings.scheduler == "edf"
        assert_serves(again)
        record = found(again).path
    assert not record.exists()
