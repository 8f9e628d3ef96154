"""Two stage processes with green contexts, from hooks to driver calls, on the fake driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from horizonserve.spatial import monitor as module
from horizonserve.spatial.monitor import VARIABLE, Monitor
from horizonserve.spatial.stage import LOOK_S

sys.path.insert(0, str(Path(__file__).parents[1] / "spatial" / "fakes"))

from fake_driver import compiled, skip_beside_a_real  # noqa: E402

pytestmark = pytest.mark.vllm
CUDA = "libcuda.so.1"


class Process:
    """A stage process that does what it is told."""

    def __init__(self, stage: int, directory: Path, env: dict[str, str], *more: str) -> None:
        command = [sys.executable, str(Path(__file__).with_name("green_child.py"))]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [*command, str(stage), str(directory), *more],
            env=env,
            stdin=pipe,
            stdout=pipe,
            text=True,
        )

    def do(self, order: str = "look") -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(order, file=self._process.stdin, flush=True)
        # vLLM logs to the same place.
        said = next(line for line in self._process.stdout if line.startswith("{"))
        return dict(json.loads(said))

    def end(self) -> None:
        self._process.communicate(timeout=60)


@pytest.fixture
def stages(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Process]]:
    """Starts a stage of one server; settings of the fake driver as keywords."""
    pytest.importorskip("vllm")
    pytest.importorskip("cuda.bindings")
    skip_beside_a_real(CUDA)
    library = compiled("libcuda.c", CUDA, tmp_path_factory.mktemp("libcuda")).parent
    shm = tmp_path / "shm"
    shm.mkdir()
    monkeypatch.setattr(module, "DIRECTORY", shm)
    monkeypatch.setenv("HORIZON_SCHEDULER", "horizon")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
    monkeypatch.delenv(VARIABLE, raising=False)
    record = Monitor.create()
    started = []

    def start(stage: int, *more: str, **fake: object) -> Process:
        env = os.environ | {f"FAKE_{name.upper()}": str(fake[name]) for name in fake}
        started.append(Process(stage, shm, env, *more))
        return started[-1]

    yield start
    for one in started:
        one.end()
    record.close()


def test_two_stages_share_the_die(stages: Callable[..., Process]) -> None:
    shared, downstream = stages(0, mps=1), stages(1, mps=1)
    mine, theirs = shared.do(), downstream.do()
    assert mine["described"]["state"] == theirs["described"]["state"] == "prepared"
    assert mine["described"]["backend"] == "green"
    assert mine["levels"] == theirs["levels"] and len(mine["levels"]) == 6
    # KV sizing saw a forward on the stream of every rung, and one without.
    assert mine["profiled"] == [6, True]
    whole = len(mine["levels"]) - 1
    assert shared.do("step")["capped"] == [False, False]  # nothing runs beside it
    downstream.do("step")
    time.sleep(LOOK_S)  # the shared stage learns of new stages once in this time
    downstream.do("step")
    mine = shared.do("step")
    assert mine["applied"] < whole and mine["capped"] == [True, True]
    theirs = downstream.do("step")
    assert theirs["applied"] == mine["applied"] and theirs["capped"] == [True, True]


@pytest.mark.parametrize(
    ("fake", "more", "why"),
    [
        ({"mps": 0}, (), "MPS is not running"),
        ({"mps": 1, "sms": 7, "cc": 80}, (), "no level lies within"),
        ({"mps": 1, "driver": 12040}, (), "12.5"),
        ({"mps": 1, "fail": "cuGreenCtxCreate:2:3"}, (), "cuGreenCtxCreate"),
        ({"mps": 1}, ("graphs",), "graphs"),
    ],
)
def test_a_stage_that_cannot_be_capped_stops_it_for_all(
    stages: Callable[..., Process], fake: dict[str, Any], more: tuple[str, ...], why: str
) -> None:
    shared, downstream = stages(0, mps=1), stages(2, *more, **fake)
    said = downstream.do("step")
    assert said["described"]["state"] == "refused" and why in said["described"]["why"]
    assert said["capped"] == [False, False]
    time.sleep(LOOK_S)
    said = shared.do("step")
    assert why in said["veto"] and said["capped"] == [False, False]


def test_stages_on_two_gpus_of_a_kind_are_not_capped(stages: Callable[..., Process]) -> None:
    shared, downstream = stages(0, mps=1, uuid=1), stages(1, mps=1, uuid=2)
    assert shared.do()["described"]["state"] == downstream.do()["described"]["state"] == "prepared"
    downstream.do("step")
    time.sleep(LOOK_S)
    assert "another split" in shared.do("step")["veto"]
    assert downstream.do("step")["capped"] == [False, False]
