"""NVML as the pressure source: the real nvidia-ml-py over a fake libnvidia-ml.so.1."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

FAKES = Path(__file__).parent / "fakes"
sys.path.insert(0, str(FAKES))

from fake_driver import compiled, skip_beside_a_real  # noqa: E402

NVML = "libnvidia-ml.so.1"
SOURCE_ROOT = Path(__file__).parents[2] / "src"


def _path(*parts: Path | str) -> str:
    """A search path of these directories; a string names a variable that has more of them."""
    found = [str(part) if isinstance(part, Path) else os.environ.get(part) for part in parts]
    return os.pathsep.join(filter(None, found))


@dataclass(frozen=True)
class Fake:
    """Where the compiled library lies, and children that find it there."""

    library: Path
    scratch: Path

    def run(self, script: str, library: Path | None = None) -> None:
        """Run a child's script; its asserts are the test's."""
        # The package may not be installed where the tests run, so the child is told where it is.
        environment = os.environ | {
            "LD_LIBRARY_PATH": _path((library or self.library).parent, "LD_LIBRARY_PATH"),
            "PYTHONPATH": _path(SOURCE_ROOT, FAKES, "PYTHONPATH"),
            "FAKE_NVML": str(self.scratch / "answers"),
            "FAKE_NVML_LOG": str(self.scratch / "calls"),
            # The order in which CUDA sees devices; NVML has one of its own.
            "CUDA_VISIBLE_DEVICES": "1,0",
        }
        code = "from nvml_child import *\n" + textwrap.dedent(script)
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    skip_beside_a_real(NVML)
    return compiled("fake_nvml.c", NVML, tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def fake(library: Path, tmp_path: Path) -> Fake:
    return Fake(library, tmp_path)


def test_the_library_is_the_fake_one(fake: Fake) -> None:
    fake.run(
        f"""
        answer("rates 50")
        assert values(source()) == [0.5]
        assert {str(fake.library)!r} in Path("/proc/self/maps").read_text()
        """
    )


def test_a_device_is_found_by_its_uuid(fake: Fake) -> None:
    """Whatever the order; CUDA and torch name it without the prefix."""
    fake.run(
        """
        answer(f"rates 10\\ndevice {UUID}\\nrates 70", uuid=OTHER)
        bare = UUID.removeprefix("GPU-")
        for uuid, value in ((UUID, 0.7), (OTHER, 0.1), (bare, 0.7)):
            assert values(NvmlSource(uuid, clock=clock)) == [value]
        missing = NvmlSource("GPU-0", clock=clock)
        try:
            missing.sample()
        except RuntimeError as error:
            assert "code 6" in str(error)
        else:
            raise AssertionError("found a device that is not there")
        """
    )


def test_each_buffered_sample_counts_once(fake: Fake) -> None:
    fake.run(
        """
        one = source()
        answer("samples 1000:10 2000:20 3000:30")
        assert values(one) == [0.1, 0.2, 0.3]
        assert values(one) == []
        answer("samples 2000:20 3000:30 4000:40")
        assert one.sample() == [(0.004, 0.4)]
        # In any order, and a slot that holds no percentage is not filled yet.
        answer("samples 7000:70 6000:4000000000 5000:50")
        assert values(one) == [0.5, 0.7]
        answer("kind 0\\nsamples 8000:12.5")
        assert values(one) == [0.125]
        assert calls()["nvmlDeviceGetUtilizationRates"] == 0
        """
    )


def test_the_average_moves_per_new_sample(fake: Fake) -> None:
    """Forty looks in the four seconds between two samples weigh no more than one."""
    fake.run(
        """
        at = sampler()
        answer("samples 1000:20")
        assert look(at) == 0.2
        answer("samples 2000:80\\nrates 99")
        seen = [look(at) for _ in range(20)]
        assert abs(seen[0] - (0.4 * 0.8 + 0.6 * 0.2)) < 1e-12
        assert set(seen) == {seen[0]}
        answer("samples 3000:80 4000:80")
        twice = 0.8 - 0.6 * 0.6 * (0.8 - seen[0])
        assert abs(look(at) - twice) < 1e-12
        assert said == [f"INFO: memory pressure from NVML memory utilisation of {UUID}"]
        """
    )


@pytest.mark.parametrize("code", [2, 3, 4, 13], ids="code{}".format)
def test_without_a_buffer_the_last_utilisation_is_used(fake: Fake, code: int) -> None:
    fake.run(
        f"""
        one = source()
        answer("samples 1000:10\\nrates 30\\nfail nvmlDeviceGetSamples {code}")
        assert values(one) == [0.3]
        assert values(one) == []
        clock.pass_s(0.2)
        answer("rates 40")
        assert values(one) == [0.4]      # another figure is a new sample
        clock.pass_s(0.9)
        assert values(one) == []         # the same may be the old one
        clock.pass_s(0.1)
        assert values(one) == [0.4]      # or, a period later, cannot be
        assert calls()["nvmlDeviceGetSamples"] == 1
        """
    )


def test_a_buffer_that_stays_silent_is_none(fake: Fake) -> None:
    fake.run(
        """
        one = source()
        answer("samples\\nrates 30")
        assert values(one) == []
        clock.pass_s(2.4)
        assert values(one) == []
        clock.pass_s(0.2)
        assert values(one) == [0.3]
        """
    )


def test_an_old_library_without_the_functions(fake: Fake, tmp_path: Path) -> None:
    without = tmp_path / "old"
    without.mkdir()
    old = compiled(
        "fake_nvml.c",
        NVML,
        without,
        "nvmlDeviceGetSamples",
        "nvmlGpmQueryDeviceSupport",
        "nvmlErrorString",
    )
    fake.run(
        """
        answer("samples 1000:10\\nrates 30\\ndram 50")
        assert values(source()) == [0.3]
        gpm = sampler(gpm=True)
        assert look(gpm) is None
        assert "Function Not Found (NVML code 13)" in said[0]
        answer("fail nvmlDeviceGetHandleByUUID 4711")
        assert look(sampler()) is None
        assert "NVML Error with code 4711" in said[1]
        """,
        library=old,
    )


def test_gpm_is_the_bandwidth_between_two_readings(fake: Fake) -> None:
    fake.run(
        """
        one = source(gpm=True)
        answer("rates 99\\nsamples 1:99\\ndram 40")
        assert values(one) == []
        clock.pass_s(0.1)
        assert values(one) == []         # too short to tell
        clock.pass_s(0.15)
        answer("dram 60")
        assert values(one) == [0.5]
        clock.pass_s(0.2)
        answer("dram 80")
        assert values(one) == [0.7]      # the later reading has become the earlier
        clock.pass_s(0.2)
        answer("dram nan")
        assert values(one) == []
        one.close()
        made = calls()
        assert made["nvmlGpmSampleAlloc"] == made["nvmlGpmSampleFree"] == 2
        assert made["nvmlDeviceGetSamples"] == made["nvmlDeviceGetUtilizationRates"] == 0
        assert open_users() == 0
        """
    )


def test_gpm_has_no_stand_in(fake: Fake) -> None:
    """Utilisation is another quantity, with another B_sat."""
    fake.run(
        """
        at = sampler(gpm=True)
        answer("rates 50")
        assert look(at) is None
        assert "GPM is not supported" in said[0]
        assert open_users() == 0
        answer("dram 50\\ndram_code 3")
        look(at), clock.pass_s(0.3)
        assert look(at) is None
        assert open_users() == 0
        answer("dram 50")
        while look(at) is None:
            assert clock() < 1060
        assert at.pressure(clock()) == 0.5
        """
    )


OPENING = (
    "nvmlInitWithFlags",
    "nvmlDeviceGetHandleByUUID",
    "nvmlGpmQueryDeviceSupport",
    "nvmlGpmSampleAlloc",
)
PER_LOOK = (
    "nvmlDeviceGetSamples",
    "nvmlDeviceGetUtilizationRates",
    "nvmlGpmSampleGet",
    "nvmlGpmMetricsGet",
)


@pytest.mark.parametrize("call", OPENING + PER_LOOK)
def test_every_failure_of_every_call_is_unknown_and_heals(fake: Fake, call: str) -> None:
    """Every code, the unknown too: at the start and, of calls made later, among good samples."""
    buffer = "" if call == "nvmlDeviceGetUtilizationRates" else "samples 1000:50"
    # What a driver without a buffer says of it is no failure: the last utilisation is used.
    not_failures = {2, 3, 4, 6, 13} if call == "nvmlDeviceGetSamples" else set()
    fake.run(
        f"""
        good = "rates 50\\ndram 50\\n{buffer}"

        def fails(at, code):
            said.clear()
            answer(good + "\\nfail {call} " + str(code))
            until_s = clock() + 1
            while look(at) is not None:
                assert clock() < until_s
            for _ in range(6):
                assert look(at) is None
            assert len(said) == 1 and said[0].startswith("WARNING: memory pressure unknown"), said
            assert f"(NVML code {{code}})" in said[0], said

        def heals(at):
            answer(good)
            until_s = clock() + 31
            while look(at) is None:
                assert clock() < until_s
            assert at.pressure(clock()) == 0.5
            assert len(said) == 2 and said[1].startswith("INFO: memory pressure from"), said

        for code in {{*range(1, 30), 999, 4711}} - {not_failures or "set()"}:
            at = sampler(gpm={"Gpm" in call})
            fails(at, code)
            heals(at)
            if {call in PER_LOOK}:
                fails(at, code)
                heals(at)
            at.close()
            assert {call == "nvmlInitWithFlags"} or open_users() == 0
        made = calls()
        kept = made["nvmlGpmSampleAlloc"] - made["nvmlGpmSampleFree"]
        assert {call == "nvmlGpmSampleAlloc"} or kept == 0
        """
    )


@pytest.mark.parametrize("code", [3, 10, 15, 16, 4711], ids="code{}".format)
def test_a_failure_in_the_middle(fake: Fake, code: int) -> None:
    """The device is lost under a running sampler and comes back; nothing is left open."""
    fake.run(
        f"""
        at = sampler()
        answer("rates 60")
        for _ in range(30):
            assert look(at) == 0.6
        clock.pass_s(31)
        times = calls()["nvmlDeviceGetUtilizationRates"] + 1
        answer(f"rates 90\\nfail nvmlDeviceGetUtilizationRates {code} {{times}} {{times + 1}}")
        assert look(at) is None                  # at once, and 1 s of pause
        assert open_users() == 0
        assert look(at) is None                  # 2 s
        assert look(at) == 0.9                   # anew, not mixed with what was before
        assert open_users() == 1
        assert [line.partition(":")[0] for line in said] == ["INFO", "WARNING", "INFO"]
        at.close()
        assert open_users() == 0
        assert at.pressure(clock()) is None
        """
    )


def test_mig_has_no_figure(fake: Fake) -> None:
    fake.run(
        """
        mig = "MIG-11111111-2222-3333-4444-555555555555"
        answer("", uuid=mig)
        at = Sampler(NvmlSource(mig, clock=clock), clock=clock)
        for _ in range(10):
            assert look(at) is None
        assert len(said) == 1 and "Not Supported (NVML code 3)" in said[0]
        """
    )


def test_no_library_until_it_is_installed(fake: Fake, tmp_path: Path) -> None:
    late = tmp_path / "late"
    late.mkdir()
    fake.run(
        f"""
        import shutil
        at = sampler()
        answer("rates 60")
        for _ in range(3):
            assert look(at) is None
        assert len(said) == 1 and "NVML Shared Library Not Found" in said[0]
        shutil.copy({str(fake.library)!r}, {str(late)!r})
        assert look(at) == 0.6
        """,
        library=late / fake.library.name,
    )


def test_no_nvidia_ml_py(fake: Fake) -> None:
    fake.run(
        """
        import sys
        sys.modules["pynvml"] = None
        at = sampler()
        assert look(at) is None
        assert "nvidia-ml-py is not usable" in said[0]
        at.close()
        """
    )


def test_a_shutdown_that_fails_is_no_failure(fake: Fake) -> None:
    fake.run(
        """
        for gpm in (False, True):
            at = sampler(gpm)
            answer("rates 60\\ndram 60")
            look(at), clock.pass_s(1), look(at)
            answer("fail nvmlShutdown 15\\nfail nvmlGpmSampleFree 15")
            at.close()
        """
    )


def test_reading_calls_nothing(fake: Fake) -> None:
    fake.run(
        """
        at = sampler()
        answer("rates 60")
        look(at)
        before = calls()
        assert {at.pressure(clock()) for _ in range(1000)} == {0.6}
        assert calls() == before
        """
    )


def test_a_library_that_hangs_makes_nobody_wait(fake: Fake) -> None:
    fake.run(
        """
        import threading, time
        answer("rates 60")
        at = Sampler(NvmlSource(UUID), period_s=0.05)
        at.start()
        while at.pressure(time.monotonic()) is None:
            time.sleep(0.02)
        answer("rates 60\\nhang nvmlDeviceGetUtilizationRates 30000")
        time.sleep(0.2)
        began_s = time.monotonic()
        assert at.pressure(time.monotonic()) == 0.6
        assert at.pressure(time.monotonic() + 5.5) is None     # stale
        at.close(wait_s=0.1)
        assert time.monotonic() - began_s < 5
        assert threading.active_count() == 2                   # and the exit does not wait either
        """
    )


def test_the_thread_ends_and_gives_back_what_it_took(fake: Fake) -> None:
    fake.run(
        """
        import threading, time
        answer("dram 60")
        at = Sampler(NvmlSource(UUID, gpm=True))
        at.start()
        assert threading.active_count() == 2
        until_s = time.monotonic() + 20
        while at.pressure(time.monotonic()) is None:
            assert time.monotonic() < until_s
            time.sleep(0.02)
        at.close()
        at.close()
        assert threading.active_count() == 1
        assert at.pressure(time.monotonic()) is None
        made = calls()
        assert made["nvmlGpmSampleAlloc"] == made["nvmlGpmSampleFree"] == 2
        assert open_users() == 0
        """
    )
