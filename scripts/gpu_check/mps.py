"""An MPS daemon of the check's own, in a private directory; device settings stay as they are."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from gpu_check.child import NotTested

CONTROL: Final = "nvidia-cuda-mps-control"
#: sun_path of a Unix socket, less the daemon's longest file name.
LONGEST_DIRECTORY: Final = 107 - len("/control_privileged")
_LIMIT_S: Final = 10.0
_GRACE_S: Final = 2.0
_VARIABLES: Final = (
    "CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_MPS_LOG_DIRECTORY",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "CUDA_MPS_SM_PARTITION",
)


def without_mps(environment: Mapping[str, str], directory: Path) -> dict[str, str]:
    """The environment of a process that finds no daemon, not even one of the machine's own."""
    plain = {key: environment[key] for key in environment if key not in _VARIABLES}
    return plain | {"CUDA_MPS_PIPE_DIRECTORY": str(directory / "none")}


class Mps:
    """The daemon, started when a part asks for it."""

    def __init__(self, environment: Mapping[str, str], directory: Path) -> None:
        """``directory`` is for its pipes and logs."""
        plain = without_mps(environment, directory)
        self._pipes = directory / "pipes"
        self._environment = plain | {
            "CUDA_MPS_PIPE_DIRECTORY": str(self._pipes),
            "CUDA_MPS_LOG_DIRECTORY": str(directory / "log"),
        }
        self._running = False
        self._refusal: str | None = None

    def environment(self) -> dict[str, str]:
        """The environment of a client.

        Raises:
            NotTested: the daemon does not start, or did not when it was first asked for.
        """
        if self._refusal is None and not self._running:
            self._refusal = self._start()
        if self._refusal is not None:
            raise NotTested(self._refusal)
        return self._environment

    def _start(self) -> str | None:
        if shutil.which(CONTROL) is None:
            return f"{CONTROL} is not on the PATH"
        if len(os.fsencode(self._pipes)) > LONGEST_DIRECTORY:
            return f"{self._pipes} is too long for a socket: choose a shorter --out"
        for directory in (self._pipes, Path(self._environment["CUDA_MPS_LOG_DIRECTORY"])):
            directory.mkdir(parents=True, exist_ok=True)
        self._running = True  # also if it only half starts
        return self._control("-d")

    def _control(self, *arguments: str, said: str = "") -> str | None:
        """Run the program; what went wrong, or None."""
        # Clients apply CUDA_VISIBLE_DEVICES to the devices that the daemon sees, numbered anew.
        environment = {k: v for k, v in self._environment.items() if k != "CUDA_VISIBLE_DEVICES"}
        # Into a file: a daemon may keep a pipe open, and its end would never come.
        output = self._pipes.with_name("control.log")
        try:
            with output.open("a") as log:
                done = subprocess.run(
                    [CONTROL, *arguments],
                    input=said.encode(),
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    timeout=_LIMIT_S,
                )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        if done.returncode:
            text = output.read_text(errors="replace").strip()[-300:]
            return f"{CONTROL} {' '.join(arguments)} exited with {done.returncode}: {text}"
        return None

    def stop(self) -> None:
        """End the daemon and its servers, if they were started; by force if they do not listen.

        A part that asks for one afterwards gets a new daemon.
        """
        if not self._running:
            return
        self._running = False
        pid = self._pid()
        self._control(said="quit -t 5\n")
        for ending in (signal.SIGTERM, signal.SIGKILL):
            until_s = time.monotonic() + _GRACE_S
            while pid is not None and _alive(pid):
                if time.monotonic() > until_s:
                    _send(pid, ending)
                    break
                time.sleep(0.05)

    def _pid(self) -> int | None:
        try:
            return int((self._pipes / f"{CONTROL}.pid").read_text())
        except (OSError, ValueError):
            return None


def _send(pid: int, number: signal.Signals) -> None:
    """To the daemon, and to its servers where it leads a group of its own."""
    with contextlib.suppress(ProcessLookupError):
        (os.killpg if os.getpgid(pid) == pid else os.kill)(pid, number)


def _alive(pid: int) -> bool:
    try:
        return CONTROL.encode()[:15] in Path(f"/proc/{pid}/comm").read_bytes()
    except OSError:
        return False
