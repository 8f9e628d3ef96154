"""Model directories on disk: a marker that says what is inside, and all-or-nothing writing."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

MARKER = "horizonserve.json"
# Raise it when a builder's output changes, so that directories of the old layout are rebuilt.
SCHEMA_VERSION = 2


@dataclass(frozen=True)
class Marker:
    """What a model directory holds."""

    family: str
    size: str
    seed: int
    schema_version: int


def read_marker(directory: Path) -> Marker | None:
    """Return the marker of ``directory``, or ``None`` where there is no readable one."""
    try:
        return Marker(**json.loads((directory / MARKER).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None


@contextmanager
def new_directory(out: Path, marker: Marker) -> Iterator[Path]:
    """Yield an empty directory that becomes ``out`` if, and only if, the block succeeds.

    The work is done beside ``out`` (same file system), so the last step is a rename and an
    interrupt leaves nothing behind. Raises :class:`FileExistsError` where ``out`` exists, is not
    empty and was not written by this function.
    """
    if out.exists() and not _replaceable(out):
        raise FileExistsError(
            f"{out} exists and was not made by make-model (no {MARKER}); "
            "choose another directory or empty it first"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        yield work
        (work / MARKER).write_text(json.dumps(asdict(marker), indent=2) + "\n", "utf-8")
        _make_readable(work)
        _swap(work, out)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _make_readable(directory: Path) -> None:
    """Let a server run by another user read it: mkdtemp and safetensors write for the owner."""
    directory.chmod(0o755)
    for path in directory.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


def _swap(work: Path, out: Path) -> None:
    """Put ``work`` in the place of ``out``, and ``out`` in the place of ``work`` if it exists."""
    if not out.exists():
        work.rename(out)
        return
    old = work.with_name(work.name + ".old")
    out.rename(old)
    try:
        work.rename(out)
    except BaseException:
        old.rename(out)
        raise
    old.rename(work)


def _replaceable(out: Path) -> bool:
    return out.is_dir() and ((out / MARKER).is_file() or not any(out.iterdir()))
