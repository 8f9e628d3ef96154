"""Runs a probe in processes of its own, and ends them when their time is over."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from gpu_check.child import NotTested

SIDES: Final = ("shared", "downstream")
#: What a child that has written its outcome may take to leave.
_LEAVE_S: Final = 5.0
_ROOT: Final = Path(__file__).resolve().parents[2]


def run(
    probe: str,
    sides: Sequence[str],
    directory: Path,
    environment: Mapping[str, str],
    limit_s: float,
) -> list[dict[str, Any]]:
    """The figures of a probe, one per side, from one process per side.

    ``directory`` is made; it gets the processes' output, outcomes and meeting points.

    Raises:
        NotTested: the reason of the first process that has none to give, or that they had not
            ended after ``limit_s``.
    """
    directory.mkdir(parents=True)
    until_s = time.monotonic() + limit_s
    paths = [str(_ROOT / "scripts"), str(_ROOT / "src"), environment.get("PYTHONPATH", "")]
    environment = dict(environment) | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        # The bindings may be newer than the driver; that is no finding.
        "CUDA_PYTHON_DISABLE_MAJOR_VERSION_WARNING": "1",
    }
    children: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for side in sides:
            command = [sys.executable, "-m", "gpu_check.child", probe, side, str(len(sides))]
            with (directory / f"{side}.log").open("wb") as log:
                children[side] = subprocess.Popen(
                    [*command, str(directory)],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        figures = _outcomes(children, directory, until_s, limit_s)
        for child in children.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_LEAVE_S)
        return figures
    finally:
        for child in children.values():
            _end(child)


def _outcomes(
    children: Mapping[str, subprocess.Popen[bytes]],
    directory: Path,
    until_s: float,
    limit_s: float,
) -> list[dict[str, Any]]:
    figures: dict[str, dict[str, Any]] = {}
    while len(figures) < len(children):
        late = time.monotonic() > until_s
        for side, child in children.items():
            if side in figures:
                continue
            # Looked at in this order: what has ended has written before.
            code = child.poll()
            file = directory / f"outcome-{side}.json"
            if file.exists():
                outcome = json.loads(file.read_text())
                if "reason" in outcome:
                    raise NotTested(outcome["reason"])
                figures[side] = outcome["figures"]
            elif code is not None:
                ended = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
                raise NotTested(f"{side} process ended by {ended}, see {directory}/{side}.log")
            elif late:
                raise NotTested(f"no end after {limit_s:.0f} s: {_last_words(directory, side)}")
        time.sleep(0.01)
    return [figures[side] for side in children]


def _last_words(directory: Path, side: str) -> str:
    lines = (directory / f"{side}.log").read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")[:300]


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
        # One that the kernel holds back is left behind.
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_LEAVE_S)
