"""Green contexts through the real cuda.bindings on a fake driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from horizonserve.spatial.green import refusals

DIES = {
    "108": {"sms": 108, "cc": 80},
    "132": {"sms": 132, "cc": 90, "reach": 120},
    "142": {"sms": 142, "cc": 89},
    "188": {"sms": 188, "cc": 120},
}


@pytest.mark.parametrize("driver", [12080, 13000, 13010])
@pytest.mark.parametrize("die", DIES)
def test_two_processes_share_the_die(drive, die: str, driver: int) -> None:
    shared, downstream = (
        drive(side, driver=driver, **DIES[die]) for side in ("shared", "downstream")
    )
    assert "error" not in shared and "error" not in downstream
    assert shared["structured"] == (driver >= 13010)
    assert shared["levels"] == downstream["levels"]
    assert 2 <= len(shared["levels"]) <= 6
    assert shared["fingerprints"] == downstream["fingerprints"]
    total = int(die)
    for level, mine, theirs in zip(
        shared["levels"], shared["ranges"], downstream["ranges"], strict=False
    ):
        # Disjoint and covering: one ends where the other starts.
        assert [*mine, *theirs] == [0, level[0], level[0], total]
    assert shared["raised"] == "'forward'"
    assert shared["stream"] == 0 and shared["context"] == 0


def test_a_die_whose_groups_stop_early_keeps_only_what_exists(drive) -> None:
    said = drive(**DIES["132"])
    assert max(shared for shared, downstream in said["levels"] if downstream) == 120


def test_the_forward_is_ordered_on_both_sides(drive, tmp_path: Path) -> None:
    drive(log=tmp_path / "log", **DIES["132"])
    lines = (tmp_path / "log").read_text().splitlines()
    order = [line for line in lines if line.startswith(("record", "wait"))]
    assert order == ["record outer", "wait level", "record level", "wait outer"] * 6
    # Kept to process end.
    assert not [line for line in lines if line.startswith("-")]


@pytest.mark.parametrize("driver", [12040])
def test_an_old_driver_is_named(drive, driver: int) -> None:
    said = drive(driver=driver)
    assert "cuGreenCtxStreamCreate" in said["error"] and "12.5" in said["error"]
    assert said["context"] == 0


BUILDING = ["cuDevResourceGenerateDesc", "cuGreenCtxCreate", "cuGreenCtxGetDevResource"]
BUILDING += ["cuGreenCtxStreamCreate", "cuEventCreate"]
ALL = ["cuInit", "cuDriverGetVersion", "cuDeviceGet", "cuDeviceGetAttribute"]
ALL += ["cuDeviceGetDevResource", "cuDevSmResourceSplit", "cuDevicePrimaryCtxRetain"]
ALL += ["cuCtxPushCurrent", "cuEventRecord", "cuStreamWaitEvent", *BUILDING]


# 4242 is a code that the bindings do not know and raise on.
ONE_CODE = [(call, 801) for call in ALL]


@pytest.mark.parametrize(("call", "code"), [*ONE_CODE, ("cuInit", 100), ("cuInit", 4242)])
def test_a_failing_call_is_named_with_its_remedy(drive, call: str, code: int) -> None:
    said = drive(fail=f"{call}:{code}")
    assert said["error"].startswith(f"{call}: ") and "; " in said["error"]
    assert said["stream"] == 0
    assert said["context"] == 0 or call == "cuInit"


@pytest.mark.parametrize("call", BUILDING)
def test_a_build_that_fails_at_the_second_level_leaves_nothing(
    drive, call: str, tmp_path: Path
) -> None:
    drive(fail=f"{call}:801:3", log=tmp_path / "log")
    lines = (tmp_path / "log").read_text().splitlines()
    for made, gone in (("context", "-context"), ("stream", "-stream"), ("event", "-event")):
        assert lines.count(made) == lines.count(gone)
    assert lines.count("retain") == lines.count("release") == 1
    assert lines.count("push") == lines.count("pop") == 1


def test_refusals() -> None:
    assert refusals(True, {}) == refusals(True, {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "100"}) == []
    found = refusals(
        False, {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50", "CUDA_MPS_SM_PARTITION": "x"}
    )
    assert [reason.split()[0] for reason in found] == [
        "MPS",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50",
        "CUDA_MPS_SM_PARTITION=x",
    ]
