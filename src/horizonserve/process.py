"""What /proc says of a process. Imports nothing heavy: a server's guard starts with it."""

from __future__ import annotations

from pathlib import Path


def stat_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on.

    Raises:
        OSError: the process is gone.
    """
    # The command name may hold spaces and brackets; the fields after the last ")" do not.
    text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    return text.rpartition(")")[2].split()
