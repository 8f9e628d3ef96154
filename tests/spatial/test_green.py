"""Green contexts through the real cuda.bindings on a fake driver."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from horizonserve.spatial.green import refusals

DIES = {
    "108": {"sms": 108, "cc": 80},
    "132": {"sms": 132, "cc": 90, "reach": 112},
    "142": {"sms": 142, "cc": 89},
    "188": {"sms": 188, "cc": 120},
}


@pytest.mark.parametrize("driver", [12080, 13000, 13010])
@pytest.mark.parametrize("die", DIES)
def test_two_processes_at_once_share_the_die(both, tmp_path: Path, die: str, driver: int) -> None:
    shared, downstream = both(meet=tmp_path, driver=driver, **DIES[die])
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


def test_two_gpus_of_a_kind_do_not_agree(drive) -> None:
    first, second = drive(uuid=1), drive(uuid=2)
    assert first["levels"] == second["levels"]
    assert first["fingerprints"][0] != second["fingerprints"][0]


def test_a_die_whose_groups_stop_early_keeps_only_what_exists(drive) -> None:
    said = drive(**DIES["132"])
    # The minimum would allow 120; this die grants nothing above 112.
    assert said["existing"] == list(range(8, 113, 8))
    assert not {120, 124} & {shared for shared, _ in said["levels"]}


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
ACTIVATING = ["cuEventRecord", "cuStreamWaitEvent"]
ALL = ["cuInit", "cuDriverGetVersion", "cuDeviceGet", "cuDeviceGetAttribute", "cuCtxGetCurrent"]
ALL += [
    "cuDeviceGetUuid",
    "cuDeviceGetDevResource",
    "cuDevSmResourceSplit",
    "cuDevicePrimaryCtxRetain",
]
ALL += ["cuCtxPushCurrent", *ACTIVATING, *BUILDING]
ROLLBACK = ["cuCtxPopCurrent", "cuDevicePrimaryCtxRelease", "cuGreenCtxDestroy"]
ROLLBACK += ["cuStreamDestroy", "cuEventDestroy"]


# 4242 is a code that the bindings do not know and raise on.
@pytest.mark.parametrize("code", [801, 4242])
@pytest.mark.parametrize("call", [*ALL, "cuCtxPopCurrent"])
def test_a_failing_call_is_named_with_its_remedy(drive, call: str, code: int) -> None:
    said = drive(fail=f"{call}:{code}")
    assert said["error"].startswith(f"{call}: ") and "; " in said["error"]
    assert str(code) in said["error"]
    assert said["stream"] == 0
    # Without these two nobody can tell or restore the context.
    assert said["context"] == 0 or call in ("cuInit", "cuCtxGetCurrent", "cuCtxPopCurrent")


@pytest.mark.parametrize("code", [801, 4242])
@pytest.mark.parametrize("call", ACTIVATING)
def test_a_failing_exit_restores_the_stream(drive, call: str, code: int) -> None:
    said = drive(fail=f"{call}:{code}:2")
    assert said["error"].startswith(f"{call}: ")
    assert said["stream"] == 0 and said["context"] == 0


@pytest.mark.parametrize("call", ACTIVATING)
def test_a_failing_exit_does_not_hide_the_forwards_error(drive, call: str) -> None:
    capped = len(drive()["levels"]) - 1
    said = drive(fail=f"{call}:801:{2 * capped + 2}")
    assert said["raised"] == "'forward'" and call in said["notes"][0]


@pytest.mark.parametrize("call", ROLLBACK)
def test_a_failing_rollback_does_not_hide_the_first_error(drive, call: str) -> None:
    said = drive(fail=f"cuEventCreate:801:4,{call}:802")
    assert said["error"].startswith("cuEventCreate: ") and said["code"] == 801
    assert any(call in note for note in said["notes"])


@pytest.mark.parametrize(
    ("driver", "call"), [(13010, "cuDevSmResourceSplit"), (12080, "cuDevSmResourceSplitByCount")]
)
@pytest.mark.parametrize("code", [1, 915])
def test_a_die_that_refuses_every_split_is_an_error(
    drive, driver: int, call: str, code: int
) -> None:
    said = drive(driver=driver, fail=f"{call}:{code}")
    assert said["error"].startswith(f"{call}: ") and said["code"] == code


@pytest.mark.slow
def test_cuda_bindings_12(drive, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(tmp_path)]
    done = subprocess.run([*command, "cuda-bindings==12.9.*"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot install cuda-bindings 12.9: {done.stderr[-300:]}")
    said = drive(python_path=tmp_path, driver=12080, **DIES["132"])
    assert said["bindings"].startswith("12.9.") and "error" not in said
    assert Path(said["file"]).is_relative_to(tmp_path)
    assert said["existing"] == list(range(8, 113, 8))


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
