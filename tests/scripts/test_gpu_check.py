"""The GPU check as a command, over the fake driver and NVML of the spatial tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fake_driver import compiled, skip_beside_a_real
from gpu_check import kernels
from gpu_check.child import NotTested, Room
from gpu_check.parts import PARTS

ROOT = Path(__file__).resolve().parents[2]
#: The fake device's UUID, every byte of it 17.
UUID = "GPU-11111111-1111-1111-1111-111111111111"
CONTROL = "nvidia-cuda-mps-control"
CLAIMS = {name: part for part in PARTS for name in part.claims}
#: Parts whose probes launch kernels, or copies.
KERNELS = {"smid", "corun", "nvml-load", "nvml-launch"}
TORCH = {"switch-torch", "graphs"}


@dataclass(frozen=True)
class Done:
    code: int
    report: dict[str, Any]
    took_s: float

    def verdict(self, claim: str) -> str:
        return str(self.report["claims"][claim]["verdict"])

    def why(self, claim: str) -> str:
        return str(self.report["claims"][claim]["why"])


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Instead of pytest's own, whose names are too long for an MPS daemon's sockets."""
    with tempfile.TemporaryDirectory(prefix="gpu-") as name:
        yield Path(name)


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the fake libcuda.so.1 and libnvidia-ml.so.1."""
    pytest.importorskip("cuda.bindings")
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    directory = tmp_path_factory.mktemp("libraries")
    for source, name in (("libcuda.c", "libcuda.so.1"), ("fake_nvml.c", "libnvidia-ml.so.1")):
        skip_beside_a_real(name)
        compiled(source, name, directory)
    return directory


@pytest.fixture
def start(libraries: Path, tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """The command; keywords are FAKE_* variables."""
    (tmp_path / "answers").write_text(nvml_answers(gap_us=200_000))

    def run(*arguments: str, path: Path | None = None, **fake: object) -> subprocess.Popen[str]:
        environment = os.environ | {
            "LD_LIBRARY_PATH": str(libraries),
            "FAKE_UUID": "17",
            "FAKE_NVML": str(tmp_path / "answers"),
            # Only what is given here; the machine may have a daemon's program.
            "PATH": os.pathsep.join(filter(None, [path and str(path), "/usr/bin", "/bin"])),
            **{f"FAKE_{key.upper()}": str(fake[key]) for key in fake},
        }
        command = [sys.executable, str(ROOT / "scripts" / "gpu_check"), *arguments]
        return subprocess.Popen(
            [*command, "--out", str(tmp_path / "out")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return run


Check = Callable[..., Done]


@pytest.fixture
def check(start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> Iterator[Check]:
    """Runs the command to its end; afterwards none of its processes is left."""

    def run(*arguments: str, **options: Any) -> Done:
        begin_s = time.monotonic()
        process = start(*arguments, **options)
        said, _ = process.communicate(timeout=300)
        assert "Traceback" not in said, said
        report = json.loads((tmp_path / "out" / "gpu_check.json").read_text())
        assert said.rstrip().endswith("gpu_check.json"), said
        return Done(process.returncode, report, time.monotonic() - begin_s)

    yield run
    assert left_behind(tmp_path) == []


def left_behind(directory: Path, wait_s: float = 10.0) -> list[str]:
    """Command lines of processes that name this directory and do not end within some seconds."""
    until_s = time.monotonic() + wait_s
    while (found := _naming(directory)) and time.monotonic() < until_s:
        time.sleep(0.1)
    return found


def _naming(directory: Path) -> list[str]:
    """Command lines of processes that name this directory, or whose environment does."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command, environment = ((entry / name).read_bytes() for name in ("cmdline", "environ"))
        except OSError:
            continue
        if str(directory).encode() in command + environment:
            found.append(command.replace(b"\0", b" ").decode())
    return found


def nvml_answers(gap_us: int) -> str:
    times = range(1_000_000, 1_000_000 + 20 * gap_us, gap_us)
    return f"device {UUID}\nsamples {' '.join(f'{at}:30' for at in times)}\nrates 30\ndram 20\n"


def test_it_runs_to_the_end_without_a_gpu(check: Check, tmp_path: Path) -> None:
    done = check()
    claims = done.report["claims"]
    assert list(claims) == list(CLAIMS)
    fails = any(claim["verdict"] == "does not hold" for claim in claims.values())
    assert done.code == fails
    for name, claim in claims.items():
        assert claim["verdict"] in ("holds", "does not hold", "not tested")
        part = CLAIMS[name]
        if part.mps:
            assert done.verdict(name) == "not tested" and CONTROL in done.why(name)
        elif part.name in TORCH:
            assert done.verdict(name) == "not tested" and "torch" in done.why(name)
        elif part.name in KERNELS:
            assert done.verdict(name) == "not tested"
            # Where the compiler is installed, the driver is the one that has no kernels.
            why = done.why(name)
            assert any(at in why for at in ("cuLibraryLoadData", "nvrtc", "cuMemAlloc")), why
        else:
            assert claim["verdict"] != "not tested", claim
    assert done.verdict("levels.exist") == done.verdict("levels.agree") == "holds"
    ladder = done.report["parts"]["levels"]["figures"][0]["ladder"]
    assert len(ladder) > 1 and ladder[-1][:2] == [132, 0]
    assert all(f"{level[0]}+{level[1]}" in done.why("levels.exist") for level in ladder)
    assert done.verdict("nvml.period") == "holds" and "0.200 s" in done.why("nvml.period")
    device = done.report["device"]
    assert device["device"] == "fake device" and device["uuid"] == UUID
    assert device["versions"]["cuda-bindings"]
    lines = (tmp_path / "out" / "gpu_check.jsonl").read_text().splitlines()
    assert [json.loads(line).get("part") for line in lines] == [
        None,
        *(part.name for part in PARTS),
    ]


@pytest.mark.parametrize(("driver", "ways"), [(12080, ["count"]), (13010, ["count", "structured"])])
def test_levels_are_listed_by_each_way_to_split(check: Check, driver: int, ways: list[str]) -> None:
    done = check("--only", "levels", driver=driver, reach=112)
    assert done.code == 0 and done.verdict("levels.agree") == "holds"
    (shared, downstream) = done.report["parts"]["levels"]["figures"]
    assert list(shared["ways"]) == ways and shared == downstream
    assert [level[0] for level in shared["ways"]["count"]] == list(range(8, 113, 8))


def test_fingerprints_that_differ_between_processes_do_not_hold(check: Check) -> None:
    done = check("--only", "levels", salt=1)
    assert done.code == 1
    assert done.verdict("levels.exist") == "holds"
    assert done.verdict("levels.agree") == "does not hold"


@pytest.mark.parametrize("code", [801, 4242])
def test_a_driver_failure_costs_only_its_part(check: Check, code: int) -> None:
    done = check("--only", "levels", "switch", fail=f"cuGreenCtxCreate:{code}")
    assert done.code == 0
    assert done.verdict("levels.agree") == "holds"
    assert done.verdict("switch.own") == "not tested"
    assert "cuGreenCtxCreate" in done.why("switch.own") and str(code) in done.why("switch.own")


def test_a_part_that_hangs_is_ended_in_time(check: Check) -> None:
    done = check("--only", "switch", "nvml", "--part-limit-s", "8", hang="cuMemGetInfo")
    assert done.verdict("switch.own") == "not tested"
    assert done.why("switch.own").startswith("no end after 8 s")
    assert done.report["parts"]["switch"]["took_s"] < 12
    assert done.verdict("nvml.latency") == "holds"


def test_a_crash_costs_only_its_part(check: Check) -> None:
    done = check("--only", "levels", "switch", "nvml", crash="cuMemGetInfo")
    assert done.verdict("switch.own") == "not tested" and "SIGABRT" in done.why("switch.own")
    assert done.verdict("levels.agree") == done.verdict("nvml.latency") == "holds"


def test_a_process_waits_for_its_neighbour_with_patience(tmp_path: Path) -> None:
    room = Room("shared", 2, tmp_path)
    with pytest.raises(NotTested, match="did not come to here"):
        room.meet("here", wait_s=0.05)
    Room("downstream", 1, tmp_path).meet("there")
    room.meet("there", wait_s=0.05)


def test_what_no_longer_fits_is_out_of_time(check: Check) -> None:
    done = check("--only", "levels", "interference", "--limit-s", "26")
    assert done.code == 0 and done.took_s < 26
    assert {done.verdict(claim) for claim in done.report["claims"]} == {"not tested"}
    assert done.why("levels.exist") == done.why("interference.uncapped") == "out of time"


@pytest.mark.parametrize("failure", ["cuInit:100", "cuDeviceGet:101"])
def test_without_a_usable_driver_nothing_is_tested(check: Check, failure: str) -> None:
    done = check(fail=failure)
    assert done.code == 2
    assert {done.verdict(claim) for claim in CLAIMS} == {"not tested"}
    call = failure.partition(":")[0]
    assert done.why("levels.exist").startswith(f"no usable driver: {call}: ")


def test_samples_too_far_apart_do_not_hold(check: Check, tmp_path: Path) -> None:
    (tmp_path / "answers").write_text(nvml_answers(gap_us=2_000_000))
    done = check("--only", "nvml")
    assert done.code == 1
    assert done.verdict("nvml.period") == "does not hold" and "2.000 s" in done.why("nvml.period")


def test_samples_without_a_time_tell_nothing_of_the_period(check: Check, tmp_path: Path) -> None:
    (tmp_path / "answers").write_text(f"device {UUID}\nrates 30\n")
    done = check("--only", "nvml")
    assert done.verdict("nvml.period") == "not tested" and "no buffer" in done.why("nvml.period")
    assert done.verdict("nvml.latency") == "holds"


def test_nvml_that_refuses_is_named(check: Check, tmp_path: Path) -> None:
    (tmp_path / "answers").write_text(f"device {UUID}\nrates 30\nfail nvmlInitWithFlags 9\n")
    done = check("--only", "nvml")
    assert done.code == 0 and "NVML code 9" in done.why("nvml.latency")


def test_a_signal_ends_what_was_started(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = start("--only", "switch", hang="cuMemGetInfo")
    until_s = time.monotonic() + 60
    while not list(tmp_path.glob("out/processes/switch-0/shared.log")):
        assert time.monotonic() < until_s
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert left_behind(tmp_path) == []


@pytest.fixture
def control(tmp_path: Path) -> Path:
    """The directory of a fake nvidia-cuda-mps-control; see there for what $FAKE_MPS can be."""
    program = tmp_path / "bin" / CONTROL
    program.parent.mkdir()
    source = Path(__file__).with_name("fake_mps_control.py").read_text()
    program.write_text(f"#!{sys.executable} -IS\n{source}")
    program.chmod(0o755)
    return program.parent


@pytest.mark.parametrize("mode", ["", "stays", "undying"])
def test_the_mps_daemon_is_private_and_gone_at_the_end(
    check: Check, control: Path, tmp_path: Path, mode: str
) -> None:
    record = tmp_path / "record"
    parts = ("levels", "smid-mps", "corun-mps")
    done = check("--only", *parts, path=control, mps=mode, mps_record=record)
    # It was there, so what is missing now is the GPU.
    for claim in ("smid-mps.disjoint", "corun-mps.beside"):
        assert done.verdict(claim) == "not tested" and "mps" not in done.why(claim)
    said = record.read_text().splitlines()
    # A part that failed may have spoilt it for the next.
    pipes = [line for line in said if line.startswith("CUDA_MPS_PIPE_DIRECTORY=")]
    assert len(pipes) == said.count("quit") == 2
    assert all(str(tmp_path / "out" / "mps") in line for line in pipes)
    assert not (tmp_path / "out" / "mps").exists()


def test_an_mps_daemon_that_does_not_start_is_named(check: Check, control: Path) -> None:
    done = check("--only", "smid-mps", "corun-mps", path=control, mps="refuses")
    for claim in ("smid-mps.disjoint", "corun-mps.beside"):
        assert done.verdict(claim) == "not tested"
        assert "cannot: refused" in done.why(claim)


@pytest.mark.parametrize("compute_capability", [(8, 0), (8, 9), (9, 0), (12, 0)])
def test_the_kernels_compile(compute_capability: tuple[int, int]) -> None:
    pytest.importorskip("cuda.bindings")
    try:
        code = kernels.compiled(b"__device__ int one;", compute_capability)
    except NotTested as error:
        pytest.skip(f"no compiler here: {error}")
    code = kernels.compiled(kernels.SOURCE, compute_capability)
    assert code.startswith(b"\x7fELF")
    assert all(name in code for name in (b"smid", b"busy", b"nothing"))


def test_a_kernel_that_does_not_compile_is_named() -> None:
    pytest.importorskip("cuda.bindings")
    with pytest.raises(NotTested, match="nvrtc"):
        kernels.compiled(b"no kernel", (9, 0))
