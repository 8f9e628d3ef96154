"""What /proc says of a process. Imports nothing heavy: a server's guard starts with it."""

from __future__ import annotations

import os
from pathlib import Path


def stat_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on.

    Raises:
        OSError: the process is gone.
    """
    # The command name may hold spaces and brackets; the fields after the last ")" do not.
    text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    return text.rpartition(")")[2].split()


def start_ticks(pid: int) -> int | None:
    """Start time of a process; with the pid it names one process for good. None if it is gone."""
    try:
        state, *rest = stat_fields(pid)
    except OSError:
        return None
    return None if state in "ZX" else int(rest[18])


def environment(pid: int) -> dict[str, str]:
    """What a process was started with.

    Raises:
        OSError: it is gone, or another user's.
    """
    raw = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    pairs = (entry.partition("=") for entry in raw.split("\0") if entry)
    return {name: value for name, _, value in pairs}


def pid_namespace() -> int:
    """The namespace that this process's pids are of; containers may share files but not this."""
    return os.stat("/proc/self/ns/pid").st_ino
