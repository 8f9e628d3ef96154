"""A server is always stopped: on the way out, on errors, on signals, on the harness's death."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from horizonserve.bench.server import ServerError, environment, free_port, serve

PATIENCE = 0.05

# Answers /health, ignores polite signals, and has an orphan in another session, a file in
# /dev/shm that only it uses, and a file in its temporary directory.
STUBBORN = textwrap.dedent(
    """
    import http.server, mmap, os, signal, subprocess, sys, tempfile
    port, name = int(sys.argv[1]), sys.argv[2]
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)  # " + name],
                     start_new_session=True)
    file = open("/dev/shm/" + name, "w+b")
    file.write(bytes(4096))
    file.flush()
    shared = mmap.mmap(file.fileno(), 4096)
    tempfile.mkdtemp(prefix=name)
    # As vLLM-Omni does for an aborted request whose id begins with the server's name.
    request = os.path.basename(tempfile.gettempdir())
    open(f"/dev/shm/shm_chatcmpl-{request}-1_0_0_lockfile.lock", "w").close()
    print("ready " + tempfile.gettempdir(), flush=True)
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
        def log_message(self, *args):
            pass
    http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
    """
)


def _argv(port: int, name: str) -> list[str]:
    return [sys.executable, "-c", STUBBORN, str(port), name]


def _alive(name: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        if int(path.parent.name) == os.getpid():
            continue
        try:
            if name.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            pass
    return found


def _eventually(condition: Callable[[], bool], limit_s: float = 15.0) -> bool:
    until_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.1)
    return True


def _nothing_left(name: str, log_file: Path) -> bool:
    scratch_dir = log_file.read_text().split("ready ")[-1].split("\n")[0]
    shm = Path("/dev/shm")
    left = [*shm.glob(f"*{name}*"), *shm.glob(f"*{Path(scratch_dir).name}*")]
    return not (_alive(name) or left or Path(scratch_dir).exists())


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_nothing_is_left(tmp_path: Path, error: type[BaseException] | None) -> None:
    name, port, log_file = f"hs-test-{os.getpid()}", free_port(), tmp_path / "server.log"
    try:
        with serve(_argv(port, name), port, log_file, patience=PATIENCE) as server:
            assert server.owns(server.pid) and not server.owns(os.getpid())
            assert Path("/dev/shm", name).exists() and len(_alive(name)) >= 2
            if error:
                raise error
    except (ValueError, KeyboardInterrupt) as raised:
        assert error and isinstance(raised, error)
    assert _nothing_left(name, log_file)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_when_the_harness_dies(tmp_path: Path, number: signal.Signals) -> None:
    name, port, log_file = f"hs-test-{os.getpid()}-k", free_port(), tmp_path / "server.log"
    script = textwrap.dedent(
        f"""
        import asyncio, pathlib, signal
        from horizonserve.bench.server import serve
        # A parent that ignores Ctrl-C, as a shell does for background jobs, is not the subject.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        argv = {_argv(port, name)!r}
        with serve(argv, {port}, pathlib.Path({str(log_file)!r}), patience={PATIENCE}):
            print("up", flush=True)
            asyncio.run(asyncio.sleep(300))
        """
    )
    harness = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert harness.stdout is not None
    assert harness.stdout.readline() == "up\n"
    assert _alive(name)
    harness.send_signal(number)
    harness.wait(20)
    harness.stdout.close()
    assert _eventually(lambda: _nothing_left(name, log_file))


def test_a_server_that_dies_shows_its_last_lines(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", "print('the reason'); raise SystemExit(3)"]
    with (
        pytest.raises(ServerError, match="(?s)died while starting.*the reason"),
        serve(argv, free_port(), tmp_path / "server.log", patience=PATIENCE),
    ):
        pass


def test_a_server_that_is_never_ready(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", "import time; print('waiting', flush=True); time.sleep(300)"]
    lines: list[str] = []
    with (
        pytest.raises(ServerError, match="(?s)not ready after 1 s.*waiting"),
        serve(
            argv,
            free_port(),
            tmp_path / "server.log",
            patience=PATIENCE,
            boot_limit_s=1.0,
            notify=lambda _, line: lines.append(line),
        ),
    ):
        pass
    assert "waiting" in lines


def test_a_program_that_is_missing(tmp_path: Path) -> None:
    with (
        pytest.raises(ServerError, match="cannot start"),
        serve(["/nonexistent/program"], free_port(), tmp_path / "server.log", patience=PATIENCE),
    ):
        pass


def test_outer_settings_do_not_reach_the_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HORIZON_SLO_TEXT_MS", "1")
    assert "HORIZON_SLO_TEXT_MS" not in environment(tmp_path)
    assert environment(tmp_path, {"HORIZON_U_GUARD": "3"})["HORIZON_U_GUARD"] == "3"
