"""The fake driver, compiled once; never where a real one is present."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FAKES = Path(__file__).parent / "fakes"
sys.path.insert(0, str(FAKES))

import fake_driver  # noqa: E402

fake_library = fake_driver.fake_library
Drive = Callable[..., dict[str, Any]]


@pytest.fixture
def start(fake_library: Path) -> Callable[..., subprocess.Popen[str]]:
    """A process that builds and activates every level; settings as FAKE_* variables."""

    def run(
        side: str = "shared", python_path: Path | None = None, **fake: object
    ) -> subprocess.Popen[str]:
        environment = os.environ | {f"FAKE_{key.upper()}": str(fake[key]) for key in fake}
        environment["LD_LIBRARY_PATH"] = str(fake_library)
        environment["CUDA_PYTHON_DISABLE_MAJOR_VERSION_WARNING"] = "1"
        if python_path:
            paths = (str(python_path), environment.get("PYTHONPATH", ""))
            environment["PYTHONPATH"] = os.pathsep.join(paths)
        command = [sys.executable, str(FAKES / "build.py"), side]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)

    return run


def said(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What the process printed at its end."""
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return dict(json.loads(output))


@pytest.fixture
def drive(start: Callable[..., subprocess.Popen[str]]) -> Drive:
    """Runs one such process to its end."""
    return lambda *arguments, **fake: said(start(*arguments, **fake))


@pytest.fixture
def both(start: Callable[..., subprocess.Popen[str]]) -> Callable[..., list[dict[str, Any]]]:
    """Runs one process per side at the same time."""
    return lambda **fake: [
        said(process) for process in [start(side, **fake) for side in ("shared", "downstream")]
    ]
