"""The harness on the real server with the tiny model."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from horizonserve.bench.compare import Arm, Experiment, Watch, compare
from horizonserve.bench.guard import descendants
from horizonserve.bench.live import Live
from horizonserve.bench.metrics import Targets
from horizonserve.bench.play import Bounds
from horizonserve.bench.result import Status
from horizonserve.bench.server import Server
from horizonserve.bench.store import Store
from horizonserve.bench.summary import rows
from horizonserve.process import start_ticks
from horizonserve.slo import RequestClass
from horizonserve.workload import Item, Mix

pytestmark = [pytest.mark.server, pytest.mark.slow]

MIX = Mix(text_tokens=(4, 8), audio_tokens=(4, 8), long_words=(60, 200))
SLO_MS = {RequestClass.T2T: 5_000.0, RequestClass.T2A: 60_000.0}


def test_one_server_serves_every_arm(server: Server, tmp_path: Path) -> None:
    experiment = Experiment(
        name="real",
        mix=MIX,
        rate_rps=1.5,
        duration_s=6.0,
        seeds=(1,),
        arms=(
            Arm("default", {"scheduler": "default", "slots": 2}),
            Arm("edf", {"scheduler": "edf", "slots": 2, "token_budget": 512}),
            Arm("horizon", {"scheduler": "horizon", "slots": 4}),
        ),
        bounds=Bounds(drain_s=60.0, request_limit_s=120.0),
    )

    async def main() -> None:
        async with Live.open(server) as live:
            base = live.record().settings
            targets = Targets({name: ms / 1_000 for name, ms in SLO_MS.items()})
            await compare(live, Store(tmp_path), experiment, base, targets, Watch())

    asyncio.run(main())
    runs = [Store(tmp_path).load(experiment.run_name(seed, arm)) for seed, arm in experiment.runs()]
    for run in runs:
        assert run.results and all(one.status is Status.OK for one in run.results), run.results
    assert [run.end["settings"]["scheduler"] for run in runs] == ["default", "edf", "horizon"]
    assert len(rows(runs)) >= 6


def test_the_server_is_idle_soon_after_everybody_hung_up(server: Server) -> None:
    async def main() -> None:
        async with Live.open(server) as live:
            items = [
                Item(0.0, RequestClass.T2A if n % 2 else RequestClass.T2T, 50, 16, n)
                for n in range(8)
            ]
            tasks = [asyncio.create_task(live.ask(item)) for item in items]
            await asyncio.sleep(0.5)
            assert await live.in_flight() > 0
            for task in tasks:
                task.cancel()
            assert {one.status for one in await asyncio.gather(*tasks)} <= {Status.CUT, Status.OK}
            await live.idle(limit_s=90.0)
            await live.nudge()

    asyncio.run(main())


def test_an_interrupt_during_boot_leaves_nothing(
    tiny_model: Path, tiny_deploy: Path, tmp_path: Path
) -> None:
    script = (
        "import sys, pathlib\n"
        "from horizonserve.bench.boot import booted\n"
        "from horizonserve.bench.compare import Watch\n"
        "with booted(*map(pathlib.Path, sys.argv[1:4]), Watch()): pass\n"
    )
    log_file = tmp_path / "server.log"
    harness = subprocess.Popen(
        [sys.executable, "-c", script, str(tiny_model), str(tiny_deploy), str(log_file)],
        stderr=subprocess.PIPE,
        text=True,
        # Where the tests run in the background it is ignored, and that is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        until_s = time.monotonic() + 400
        # The stage processes are there when the first of them writes to the log.
        while b"StageEngineCoreProc" not in (log_file.read_bytes() if log_file.exists() else b""):
            assert time.monotonic() < until_s and harness.poll() is None
            time.sleep(0.5)
        before = descendants(harness.pid)
        assert len(before) >= 3  # guard, front end, a stage
    finally:
        harness.send_signal(signal.SIGINT)
        _, errors = harness.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors
    until_s = time.monotonic() + 5.0  # a killed process takes a moment to give its memory back
    while left := [pid for pid in before if start_ticks(pid) is not None]:
        assert time.monotonic() < until_s, left
        time.sleep(0.1)
