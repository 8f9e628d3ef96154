"""scripts/mps against a daemon of our own: what it starts, what it says, what it leaves behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pty
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "spatial" / "fakes"))

from fake_driver import compiled, skip_beside_a_real  # noqa: E402

MPS = ROOT / "scripts" / "mps"
NVML = "libnvidia-ml.so.1"
CONTROL = "nvidia-cuda-mps-control"
FAKE_CONTROL = Path(__file__).with_name("fake_mps_control.py")

OWN_ERROR, NOT_EXECUTABLE, NOT_FOUND = 125, 126, 127
PATIENCE_S = 20.0


def until(true: Callable[[], object], wait_s: float = PATIENCE_S) -> None:
    deadline_s = time.monotonic() + wait_s
    while not true():
        assert time.monotonic() < deadline_s, "did not happen"
        time.sleep(0.02)


def holds(path: Path, text: str) -> bool:
    return path.exists() and text in path.read_text()


class Machine:
    """A computer with a GPU and an MPS control program, as far as scripts/mps can tell."""

    def __init__(self, home: Path, nvml: Path) -> None:
        self.home = home
        #: Where a daemon without --dir goes; nothing else is in it.
        self.fresh = home / "run"
        self.fresh.mkdir()
        self.dir = home / "dir"
        self.record = home / "record"
        self.devices = home / "devices"
        self.devices.write_text("device GPU-0\n")
        self.bin = home / "bin"
        self.bin.mkdir()
        control = self.bin / CONTROL
        # -I and -S: it starts often, and needs nothing.
        control.write_text(f"#!{sys.executable} -IS\n{FAKE_CONTROL.read_text()}")
        control.chmod(0o755)
        self.environment = {
            **{name: text for name, text in os.environ.items() if not name.startswith("CUDA_")},
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": str(nvml),
            "FAKE_NVML": str(self.devices),
            "FAKE_MPS_RECORD": str(self.record),
            "XDG_RUNTIME_DIR": str(self.fresh),
        }

    def begin(self, *arguments: str | Path, **more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, MPS, *arguments],
            env=self.environment | more,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *arguments: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
        process = self.begin(*arguments, **more)
        output, errors = process.communicate(timeout=60)
        return subprocess.CompletedProcess(arguments, process.returncode, output, errors)

    def mps_processes(self) -> list[int]:
        """Every process of the control program's kind that has our home in its environment."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                ours = str(self.home).encode() in (entry / "environ").read_bytes()
                if ours and (entry / "comm").read_text().startswith("nvidia-cuda"):
                    found.append(int(entry.name))
        return found

    def nothing_left(self) -> bool:
        return not self.mps_processes() and not any(self.fresh.iterdir()) and not self.dir.exists()

    def recorded(self) -> list[str]:
        return self.record.read_text().splitlines()


@pytest.fixture(scope="session")
def fake_nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled("fake_nvml.c", NVML, tmp_path_factory.mktemp("nvml")).parent


@pytest.fixture
def machine(fake_nvml: Path) -> Iterator[Machine]:
    # pytest's own directories have names too long for a socket.
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="mps") as home:
        one = Machine(Path(home), fake_nvml)
        try:
            yield one
        finally:
            for pid in one.mps_processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def test_a_command_sees_its_daemon_and_leaves_nothing(machine: Machine) -> None:
    seen = machine.home / "seen"
    script = f"""
        env > {seen}
        stat -c %a $CUDA_MPS_PIPE_DIRECTORY/.. $CUDA_MPS_PIPE_DIRECTORY >> {seen}
        echo start_server -uid 0 | {CONTROL} >> {seen} && echo answered >> {seen}
    """
    limits = {
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50",
        "CUDA_MPS_SM_PARTITION": "x",
        "CUDA_VISIBLE_DEVICES": "1",
    }
    result = machine("run", "--", "sh", "-c", script, **limits)
    assert result.returncode == 0, result.stderr
    lines = seen.read_text().splitlines()
    (pipe,) = (line for line in lines if line.startswith("CUDA_MPS_PIPE_DIRECTORY="))
    (log,) = (line for line in lines if line.startswith("CUDA_MPS_LOG_DIRECTORY="))
    assert Path(pipe.partition("=")[2]).parent.parent == machine.fresh
    assert not any(line.startswith(("CUDA_MPS_ACTIVE", "CUDA_MPS_SM")) for line in lines)
    assert "CUDA_VISIBLE_DEVICES=1" in lines
    assert lines.count("700") == 2
    assert "answered" in lines
    of_the_daemon = [line for line in machine.recorded() if line.startswith("CUDA_")]
    assert sorted(of_the_daemon) == sorted([pipe, log])
    assert machine.recorded()[-1] == "quit"
    assert machine.nothing_left()


@pytest.mark.parametrize(
    ("script", "status"), [("exit 7", 7), ("kill -9 $$", 128 + 9), ("kill -TERM $$", 128 + 15)]
)
def test_the_status_is_the_commands(machine: Machine, script: str, status: int) -> None:
    assert machine("run", "--", "sh", "-c", script).returncode == status
    assert machine.nothing_left()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_signals_reach_the_command(machine: Machine, signum: signal.Signals) -> None:
    up = machine.home / "up"
    script = f"""
import signal, sys, time
signal.signal({int(signum)}, lambda *_: sys.exit(3))
open({str(up)!r}, "w")
while True: time.sleep(0.05)
"""
    process = machine.begin("run", "--", sys.executable, "-c", script)
    until(up.exists)
    process.send_signal(signum)
    assert process.wait(PATIENCE_S) == 3
    assert machine.nothing_left()


def test_the_terminals_interrupt_is_not_doubled(machine: Machine) -> None:
    up, times = machine.home / "up", machine.home / "times"
    script = f"""
import signal, time
signal.signal(signal.SIGINT, lambda *_: open({str(times)!r}, "a").write("x"))
open({str(up)!r}, "w")
deadline = time.monotonic() + {PATIENCE_S}
while not __import__("os").path.exists({str(times)!r}) and time.monotonic() < deadline:
    time.sleep(0.05)
time.sleep(0.5)
"""
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        command = [sys.executable, str(MPS), "run", "--", sys.executable, "-c", script]
        os.execve(sys.executable, command, machine.environment)
    try:
        until(up.exists)
        os.write(terminal, b"\x03")
        _, status = os.waitpid(pid, 0)
    finally:
        os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 0
    assert times.read_text() == "x"
    assert machine.nothing_left()


@pytest.mark.parametrize("mode", ["hangs", "mute"])
@pytest.mark.parametrize("action", ["run", "start"])
def test_a_signal_while_starting(machine: Machine, mode: str, action: str) -> None:
    last = ["--", "true"] if action == "run" else []
    process = machine.begin(action, "--dir", machine.dir, *last, FAKE_MPS=mode)
    until(machine.mps_processes)
    process.terminate()
    assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM
    assert machine.nothing_left()


def test_a_daemon_that_ignores_quit(machine: Machine) -> None:
    script = f"echo start_server -uid 0 | {CONTROL}; exit 5"
    result = machine("run", "--", "sh", "-c", script, FAKE_MPS="undying")
    assert result.returncode == 5, result.stderr
    # Each step was tried before the next, harder one; the last two on both processes.
    assert machine.recorded()[-3:] == ["quit", "SIGTERM", "SIGTERM"]
    assert machine.nothing_left()


def test_start_and_stop_may_be_repeated(machine: Machine) -> None:
    assert "not running" in machine("stop", "--dir", machine.dir).stderr
    assert not machine.dir.exists()

    first = machine("start", "--dir", machine.dir, CUDA_MPS_SM_PARTITION="x")
    assert first.returncode == 0, first.stderr
    pids = machine.mps_processes()
    script = (
        f'eval "$EXPORTS"; echo get_server_list | {CONTROL} && test -z "$CUDA_MPS_SM_PARTITION"'
    )
    environment = machine.environment | {"EXPORTS": first.stdout, "CUDA_MPS_SM_PARTITION": "x"}
    subprocess.run(["sh", "-c", script], env=environment, check=True)

    again = machine("start", "--dir", machine.dir)
    assert again.returncode == 0
    assert again.stdout == first.stdout
    assert f"already running: daemon {pids[0]}" in again.stderr
    assert machine.mps_processes() == pids

    stopped = machine("stop", "--dir", machine.dir)
    assert stopped.returncode == 0
    assert f"stopped daemon {pids[0]}" in stopped.stderr
    assert machine.nothing_left()
    assert machine("stop", "--dir", machine.dir).returncode == 0


@pytest.mark.parametrize("action", ["start", "stop", "run"])
def test_what_a_dead_daemon_left_is_removed(machine: Machine, action: str) -> None:
    machine("start", "--dir", machine.dir)
    (pid,) = machine.mps_processes()
    os.kill(pid, signal.SIGKILL)
    until(lambda: not machine.mps_processes())
    # Its pid is another process's by now.
    innocent = subprocess.Popen(["sleep", "60"])
    try:
        (machine.dir / "pipe" / f"{CONTROL}.pid").write_text(f"{innocent.pid}\n")
        last = ["--", "true"] if action == "run" else []
        result = machine(action, "--dir", machine.dir, *last)
        assert result.returncode == 0, result.stderr
        assert "removed the files of a dead daemon" in result.stderr
        assert "scripts/mps start" in result.stderr
        assert innocent.poll() is None
    finally:
        innocent.kill()
        innocent.wait()
    assert len(machine.mps_processes()) == (1 if action == "start" else 0)
    machine("stop", "--dir", machine.dir)
    assert machine.nothing_left()


def test_start_replaces_a_daemon_that_does_not_answer(machine: Machine) -> None:
    machine("start", "--dir", machine.dir)
    (pid,) = machine.mps_processes()
    os.kill(pid, signal.SIGSTOP)
    result = machine("start", "--dir", machine.dir)
    assert result.returncode == 0, result.stderr
    assert f"removed daemon [{pid}]" in result.stderr
    (other,) = machine.mps_processes()
    assert other != pid
    machine("stop", "--dir", machine.dir)
    assert machine.nothing_left()


@pytest.mark.parametrize("action", ["start", "stop"])
def test_killed_and_tidied_by_the_next(machine: Machine, action: str) -> None:
    ended = machine.home / "ended"
    up = machine.home / "up"
    script = f"""
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path({str(ended)!r}).touch(), sys.exit()))
pathlib.Path({str(up)!r}).touch()
time.sleep(60)
"""
    process = machine.begin("run", "--dir", machine.dir, "--", sys.executable, "-c", script)
    until(up.exists)
    (left,) = machine.mps_processes()
    process.kill()
    process.wait()
    until(ended.exists)
    assert machine.mps_processes() == [left]

    assert machine("run", "--", "true").returncode == 0
    assert machine.mps_processes() == [left]
    assert not any(machine.fresh.iterdir())

    result = machine(action, "--dir", machine.dir)
    assert result.returncode == 0, result.stderr
    assert f"removed daemon [{left}]" in result.stderr
    assert "scripts/mps run" in result.stderr
    if action == "start":
        (pid,) = machine.mps_processes()
        assert pid != left
        machine("stop", "--dir", machine.dir)
    assert machine.nothing_left()


def test_one_directory_has_one_user(machine: Machine) -> None:
    process = machine.begin("run", "--dir", machine.dir, "--", "sleep", "60")
    until(lambda: holds(machine.record, "get_server_list"))
    for action in ("start", "stop"):
        result = machine(action, "--dir", machine.dir)
        assert result.returncode == OWN_ERROR
        assert f"in use by scripts/mps run (pid {process.pid})" in result.stderr
    process.terminate()
    assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM
    assert machine.nothing_left()

    machine("start", "--dir", machine.dir)
    (pid,) = machine.mps_processes()
    result = machine("run", "--dir", machine.dir, "--", "true")
    assert result.returncode == OWN_ERROR
    assert f"`scripts/mps start` made runs there (pid {pid})" in result.stderr
    assert machine.mps_processes() == [pid]
    machine("stop", "--dir", machine.dir)


def test_a_directory_that_was_there_stays(machine: Machine) -> None:
    machine.dir.mkdir()
    assert machine("run", "--dir", machine.dir, "--", "true").returncode == 0
    assert machine("start", "--dir", machine.dir).returncode == 0
    assert machine("stop", "--dir", machine.dir).returncode == 0
    assert list(machine.dir.iterdir()) == []


def test_what_the_command_wrote_stays(machine: Machine) -> None:
    script = f"echo kept > {machine.dir}/mine"
    assert machine("run", "--dir", machine.dir, "--", "sh", "-c", script).returncode == 0
    assert [file.name for file in machine.dir.iterdir()] == ["mine"]


@pytest.mark.parametrize("action", ["run", "start"])
@pytest.mark.parametrize(
    ("mode", "words"), [("refuses", "cannot: refused"), ("dies", "cannot: died")]
)
def test_a_daemon_that_does_not_come_up(
    machine: Machine, action: str, mode: str, words: str
) -> None:
    ran = machine.home / "ran"
    last = ["--", "touch", ran] if action == "run" else []
    result = machine(action, "--dir", machine.dir, *last, FAKE_MPS=mode)
    assert result.returncode == OWN_ERROR
    assert f"{CONTROL} -d ended at once" in result.stderr
    assert words in result.stderr
    assert not ran.exists()
    assert not result.stdout
    assert machine.nothing_left()


def test_a_daemon_that_never_answers(machine: Machine) -> None:
    result = machine("run", "--", "true", FAKE_MPS="mute")
    assert result.returncode == OWN_ERROR
    assert "does not answer" in result.stderr
    assert "Starting control daemon" in result.stderr
    assert machine.nothing_left()


@pytest.mark.parametrize("action", ["run", "start"])
def test_no_control_program(machine: Machine, action: str) -> None:
    (machine.bin / CONTROL).unlink()
    if shutil.which(CONTROL):
        pytest.skip(f"a real {CONTROL} is on PATH")
    last = ["--", "true"] if action == "run" else []
    result = machine(action, "--dir", machine.dir, *last)
    assert result.returncode == OWN_ERROR
    assert f"{CONTROL} is not on PATH" in result.stderr
    assert machine.nothing_left()


def test_a_daemon_is_stopped_without_the_control_program(machine: Machine) -> None:
    machine("start", "--dir", machine.dir)
    (machine.bin / CONTROL).unlink()
    if shutil.which(CONTROL):
        pytest.skip(f"a real {CONTROL} is on PATH")
    assert machine("stop", "--dir", machine.dir).returncode == 0
    assert machine.nothing_left()


def test_no_driver(machine: Machine) -> None:
    skip_beside_a_real(NVML)
    result = machine("run", "--", "true", LD_LIBRARY_PATH="")
    assert result.returncode == OWN_ERROR
    assert "no NVIDIA driver" in result.stderr
    assert machine.nothing_left()


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        ("", "has no GPU for us"),
        ("fail nvmlInitWithFlags 9\n", "fake error 9"),
        ("device GPU-0\nfail nvmlDeviceGetCount 999\n", "fake error 999"),
    ],
)
def test_no_gpu(machine: Machine, devices: str, words: str) -> None:
    machine.devices.write_text(devices)
    result = machine("start", "--dir", machine.dir)
    assert result.returncode == OWN_ERROR
    assert words in result.stderr
    assert machine.nothing_left()


def test_commands_that_cannot_be_run(machine: Machine) -> None:
    missing = machine("run", "--", "no-such-command")
    assert missing.returncode == NOT_FOUND
    assert "no-such-command: command not found" in missing.stderr

    plain = machine.home / "plain"
    plain.write_text("#!/bin/sh\n")
    assert machine("run", "--", plain).returncode == NOT_EXECUTABLE
    # Only the kernel finds that this one is no program, when the daemon is up.
    plain.write_text("neither script nor program\n")
    plain.chmod(0o755)
    assert not machine.record.exists()
    result = machine("run", "--", plain)
    assert result.returncode == NOT_EXECUTABLE
    assert "cannot be executed" in result.stderr
    assert machine.recorded()[-1] == "quit"
    assert machine.nothing_left()


@pytest.mark.parametrize("arguments", [("run",), ("run", "--"), ("start",), ("run", "true")])
def test_usage(machine: Machine, arguments: tuple[str, ...]) -> None:
    result = machine(*arguments)
    assert result.returncode == 2
    assert "usage" in result.stderr


def test_a_path_too_long_for_a_socket(machine: Machine) -> None:
    longest = "pipe/control_privileged"
    room = 107 - len(str(machine.home)) - len(longest) - 2
    assert machine("run", "--dir", machine.home / ("d" * room), "--", "true").returncode == 0
    result = machine("run", "--dir", machine.home / ("d" * (room + 1)), "--", "true")
    assert result.returncode == OWN_ERROR
    assert "too long" in result.stderr
    assert not list(machine.home.glob("d" * room + "*"))


def test_directories_that_cannot_be_used(machine: Machine) -> None:
    def refused(directory: Path) -> str:
        result = machine("run", "--dir", directory, "--", "true")
        assert result.returncode == OWN_ERROR
        assert "Traceback" not in result.stderr
        return result.stderr

    assert "directory that exists" in refused(machine.home / "no" / "parent")
    file = machine.home / "file"
    file.write_text("kept")
    assert "cannot be written" in refused(file)
    others = machine.home / "others"
    (others / "pipe").mkdir(parents=True)
    (others / "pipe" / "kept").touch()
    assert "holds files of others" in refused(others)
    assert (others / "pipe" / "kept").exists()
    assert not machine.record.exists()


def test_a_directory_that_is_not_writable(machine: Machine) -> None:
    machine.dir.mkdir(mode=0o500)

    def as_everybody() -> None:
        # root may write everywhere, by a capability that it can give up (PR_CAPBSET_DROP).
        ctypes.CDLL(None).prctl(24, 1, 0, 0, 0)

    result = subprocess.run(
        [sys.executable, MPS, "start", "--dir", machine.dir],
        env=machine.environment,
        capture_output=True,
        text=True,
        preexec_fn=as_everybody,
        timeout=60,
    )
    assert result.returncode == OWN_ERROR
    assert "cannot be written (Permission denied)" in result.stderr
    assert list(machine.dir.iterdir()) == []
