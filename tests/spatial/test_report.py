"""What people are told of a server's spatial control."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from horizonserve.config import Settings
from horizonserve.spatial import monitor as module
from horizonserve.spatial.ladder import Level
from horizonserve.spatial.monitor import VARIABLE, Monitor, State
from horizonserve.spatial.report import gpu_conditions, report

LEVELS = (Level(1, 1, 5), Level(2, 0))
ON = Settings(scheduler="horizon")


def test_of_a_server_that_prepared_nothing() -> None:
    assert report({"state": "not prepared"}, ON) == {"state": "not prepared"}


def test_of_stages_that_have_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DIRECTORY", tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)
    record = Monitor.create()
    described = {"state": "prepared", "record": record.path.name, "backend": "cores"}
    now_s = time.monotonic()
    record.claim(0, LEVELS).publish(State(False, now_s, 0, 0, 1, 0.25, now_s), now_s)
    record.claim(2, LEVELS)
    said = report(described, ON)
    assert (said["state"], said["pressure"], said["backend"]) == ("on", 0.25, "cores")
    shared, downstream = said["stages"]["0"], said["stages"]["2"]
    assert shared["level"] == [1, 1] and 0 <= shared["last_forward_s_ago"] < 5
    assert downstream == {
        "pid": os.getpid(),
        "alive": True,
        "level": None,
        "last_forward_s_ago": None,
    }
    assert report(described, ON.changed({"spatial": False}))["state"] == "off"
    record.veto("stage 2: gone")
    said = report(described, ON)
    assert (said["state"], said["why"]) == ("refused", "stage 2: gone")
    record.close()
    assert report(described, ON)["state"] == "refused"


def test_conditions_come_from_the_servers_own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    # /proc shows the environment a process was started with: not what is set afterwards.
    monkeypatch.setenv("CUDA_MPS_SM_PARTITION", "x")
    assert gpu_conditions(os.getpid())["no SM partition"] is None
    assert list(gpu_conditions(2**22 + 1)) == ["the server's environment"]
