"""The real server as a context manager that always stops it."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from horizonserve.bench.guard import STOP_LIMIT_S, descendants

HOST: Final = "127.0.0.1"
#: The name under which requests address the model, whatever its directory is called.
MODEL_NAME: Final = "bench"
_LAST_LINES: Final = 25

#: Told the seconds since the start and the last line of the log.
Notify = Callable[[float, str], None]


class ServerError(RuntimeError):
    """The server did not start or died; the message ends with its last log lines."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers."""

    url: str
    log_file: Path
    pid: int
    #: Begins the id of every request that the harness sends, so that the guard can tell which
    #: files a request left.
    name: str = "bench"

    def owns(self, pid: int) -> bool:
        """Whether a process belongs to this server."""
        with contextlib.suppress(OSError):
            return os.getsid(pid) == self.pid
        return False

    def stages(self) -> list[int]:
        """The processes that compute: all of the server's but the front end."""
        return descendants(self.pid)


def free_port() -> int:
    """A TCP port nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def command_line(
    model: Path | str,
    deploy_file: Path | None,
    *,
    scheduler: str,
    port: int,
    extra: Sequence[str] = (),
) -> list[str]:
    """The command a user would type, with this environment's ``vllm-omni``.

    Raises:
        ServerError: vLLM-Omni is not installed here.
    """
    beside = Path(sys.executable).with_name("vllm-omni")
    program = str(beside) if beside.exists() else shutil.which("vllm-omni")
    if program is None:
        raise ServerError("vllm-omni: not found; install it with `pip install horizonserve[cpu]`")
    return [
        *(program, "serve", str(model), "--omni"),
        *("--served-model-name", MODEL_NAME),
        *(("--deploy-config", str(deploy_file)) if deploy_file else ()),
        *("--scheduler", scheduler),
        *("--host", HOST, "--port", str(port)),
        *extra,
    ]


def environment(scratch_dir: Path, changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of the server: this one's, kept offline, with its own temporary files."""
    defaults = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    own = {"TMPDIR": str(scratch_dir), "VLLM_RPC_BASE_PATH": str(scratch_dir)}
    # An outer HORIZON_ setting would change what is measured without anybody being told.
    outer = {name: text for name, text in os.environ.items() if not name.startswith("HORIZON_")}
    return {**defaults, **outer, **own, **(changes or {})}


@contextlib.contextmanager
def serve(
    argv: Sequence[str],
    port: int,
    log_file: Path,
    *,
    boot_limit_s: float = 600.0,
    patience: float = 1.0,
    env: Mapping[str, str] | None = None,
    notify: Notify = lambda _elapsed_s, _line: None,
) -> Iterator[Server]:
    """Start a server, wait until it answers, stop it on the way out, whatever the way.

    ``patience`` scales how long it may take to obey each signal.

    Raises:
        ServerError: it died or was not ready within ``boot_limit_s``.
    """
    log_file.parent.mkdir(parents=True, exist_ok=True)
    log_file.write_bytes(b"")
    # Short, because sockets live below it and their paths are limited to 107 bytes.
    scratch_dir = Path(tempfile.mkdtemp(prefix="horizonserve-"))
    try:
        guard = subprocess.Popen(
            [sys.executable, "-m", "horizonserve.bench.guard"]
            + [str(patience), str(log_file.absolute()), str(scratch_dir), *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env=environment(scratch_dir, env),
            text=True,
        )
    except BaseException:
        shutil.rmtree(scratch_dir, ignore_errors=True)
        raise
    try:
        assert guard.stdout is not None
        line = guard.stdout.readline().strip()
        if not line.isdigit():
            raise ServerError(line or f"the guard of the server died: {guard.wait(5.0)}")
        server = Server(f"http://{HOST}:{port}", log_file, int(line), scratch_dir.name)
        _await_health(server, guard, boot_limit_s, notify)
        yield server
        if guard.poll() is not None:
            raise ServerError(f"the server died under load\n{last_lines(log_file)}")
    finally:
        _stop(guard)


def _stop(guard: subprocess.Popen[str]) -> None:
    assert guard.stdin is not None
    with contextlib.suppress(OSError):
        guard.stdin.close()  # the guard takes this as the order to stop
    with contextlib.suppress(subprocess.TimeoutExpired):
        guard.wait(STOP_LIMIT_S + 10.0)
    if guard.stdout is not None:
        guard.stdout.close()


def _await_health(
    server: Server, guard: subprocess.Popen[str], boot_limit_s: float, notify: Notify
) -> None:
    start_s = time.monotonic()
    while not _answers(f"{server.url}/health"):
        elapsed_s = time.monotonic() - start_s
        if guard.poll() is not None:
            raise ServerError(f"the server died while starting\n{last_lines(server.log_file)}")
        if elapsed_s > boot_limit_s:
            raise ServerError(
                f"the server was not ready after {boot_limit_s:.0f} s; give it longer or see"
                f" {server.log_file}\n{last_lines(server.log_file)}"
            )
        notify(elapsed_s, last_lines(server.log_file, 1))
        time.sleep(0.5)


def _answers(url: str) -> bool:
    # No proxy: the server is on this machine, whatever the environment says.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=2.0) as response:
            return int(response.status) == 200
    except (OSError, urllib.error.URLError, ValueError):
        return False


def last_lines(log_file: Path, count: int = _LAST_LINES) -> str:
    """The end of a log, for people."""
    try:
        with log_file.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 32_768))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join([line for line in lines if line.strip()][-count:])
