"""Making a file that other processes read while it is in use."""

from __future__ import annotations

import os
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Write a file, all of it or nothing, and the directories above it.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}")
    aside.write_text(text, encoding="utf-8")
    aside.rename(path)


def make(path: Path, content: bytes | bytearray) -> int:
    """Make ``path``, mode 0600, with this content; returns the open file.

    It is written aside and renamed, so that a reader never meets half of it. What an earlier
    process left there, or aside, is replaced.

    Raises:
        OSError: it cannot be written; no open file is left.
    """
    aside = path.with_name(f".{path.name}")
    aside.unlink(missing_ok=True)
    file = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(file, content, 0)
        aside.rename(path)
    except BaseException:
        os.close(file)
        raise
    return file
