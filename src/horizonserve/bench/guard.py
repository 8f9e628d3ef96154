"""A process between the harness and a server, so that the server is stopped whatever happens.

    python -m horizonserve.bench.guard PATIENCE LOG_FILE SCRATCH_DIR COMMAND...

It starts the command in a session of its own and waits for its standard input to close, which the
kernel does even when the harness is killed. Then it stops every descendant (SIGINT, SIGTERM,
SIGKILL; PATIENCE scales the waits between), removes the files that they alone left in /dev/shm,
and the scratch directory. It imports nothing heavy and prints one line: the pid of the command.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from horizonserve.process import stat_fields

SHM: Final = Path("/dev/shm")
#: Signals in order, and how long each is given to work. The first SIGKILL spares the processes
#: that remove semaphores once their parent is gone (Python's resource trackers).
STEPS: Final = (
    (signal.SIGINT, 15.0),
    (signal.SIGTERM, 10.0),
    (signal.SIGKILL, 5.0),
    (signal.SIGKILL, 2.0),
)
#: What the whole stop can take; the harness waits a little longer.
STOP_LIMIT_S: Final = sum(wait_s for _, wait_s in STEPS) + 5.0

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_LONGEST_LOOK_S: Final = 60.0


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def is_runnable(pid: int) -> bool:
    """Whether the main thread of a process computes or waits for a core to do so."""
    with contextlib.suppress(OSError, IndexError):
        return stat_fields(pid)[0] == "R"
    return False


def descendants(pid: int) -> list[int]:
    """Every living process below ``pid``."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            state, parent, *_ = stat_fields(int(path.name))
            if state not in "ZX":
                children.setdefault(int(parent), []).append(int(path.name))
    found, ahead = [], [pid]
    while ahead:
        below = children.get(ahead.pop(), [])
        found += below
        ahead += below
    return found


def _is_tracker(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _shm_files(pid: int) -> Iterator[Path]:
    """Files in /dev/shm that a process has mapped or open."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            if f" {SHM}/" in line:
                yield SHM / line.partition(f" {SHM}/")[2].removesuffix(" (deleted)")
    with contextlib.suppress(OSError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = Path(os.readlink(fd))
                if target.parent == SHM:
                    yield target


class Guard:
    """Runs one command and takes everything it started down with it."""

    def __init__(self, argv: list[str], log_file: Path, scratch_dir: Path) -> None:
        # Orphans of the command become our children instead of init's, so none gets away.
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._foreign = set(SHM.iterdir())
        self._files: set[Path] = set()
        self._scratch_dir = scratch_dir
        with log_file.open("ab") as log:
            self._command = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # The last resort, for when this process is killed too.
                preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
            )

    @property
    def pid(self) -> int:
        return self._command.pid

    @property
    def exit_status(self) -> int | None:
        """Of the command; None while it lives."""
        return self._command.returncode

    def watch(self, stdin_fd: int) -> None:
        """Return when standard input closes or the command ends."""
        look_s, next_look_s = 1.0, time.monotonic() + 1.0
        while self._reap():
            readable, _, _ = select.select([stdin_fd], [], [], 0.5)
            if readable and not os.read(stdin_fd, 4096):
                return
            if time.monotonic() >= next_look_s:
                self._note_files()
                look_s = min(2 * look_s, _LONGEST_LOOK_S)
                next_look_s = time.monotonic() + look_s

    def stop(self, patience: float) -> None:
        """Stop every descendant, then remove what they left."""
        self._note_files()
        for index, (number, wait_s) in enumerate(STEPS):
            last = index == len(STEPS) - 1
            for pid in descendants(os.getpid()):
                if number == signal.SIGKILL and not last and _is_tracker(pid):
                    continue
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            until_s = time.monotonic() + wait_s * patience
            while time.monotonic() < until_s:
                self._reap()
                if not descendants(os.getpid()):
                    break
                time.sleep(0.05)
            else:
                continue
            break
        # Files named after a request are not held open by anybody: vLLM-Omni leaves the lock files
        # of aborted requests. The harness names its requests after the scratch directory.
        for path in (*self._files, *SHM.glob(f"*{glob.escape(self._scratch_dir.name)}*")):
            with contextlib.suppress(OSError):
                path.unlink()
        shutil.rmtree(self._scratch_dir, ignore_errors=True)

    def _note_files(self) -> None:
        for pid in descendants(os.getpid()):
            self._files.update(path for path in _shm_files(pid) if path not in self._foreign)

    def _reap(self) -> bool:
        """Collect dead children; whether the command still lives."""
        with contextlib.suppress(ChildProcessError):
            while (done := os.waitpid(-1, os.WNOHANG))[0]:
                if done[0] == self._command.pid:
                    self._command.returncode = os.waitstatus_to_exitcode(done[1])
        return self._command.returncode is None


def main(argv: list[str]) -> int:
    """Run the command; its exit status, or 0 when it was stopped on request."""
    patience, log_file, scratch_dir, *command = argv
    # A handler rather than SIG_IGN, which the command would inherit.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        guard = Guard(command, Path(log_file), Path(scratch_dir))
    except OSError as error:
        print(f"cannot start {command[0]}: {error}", flush=True)
        shutil.rmtree(scratch_dir, ignore_errors=True)
        return 127
    try:
        print(guard.pid, flush=True)
        guard.watch(sys.stdin.fileno())
        return guard.exit_status or 0
    finally:
        signal.signal(signal.SIGTERM, lambda *_: None)
        guard.stop(float(patience))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
