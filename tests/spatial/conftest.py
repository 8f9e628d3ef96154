"""The fake driver, compiled once; never where a real one is present."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FAKES = Path(__file__).parent / "fakes"
Drive = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the fake libcuda.so.1."""
    pytest.importorskip("cuda.bindings")
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler for the fake driver")
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pass
    else:
        pytest.skip("a real CUDA driver is here; the fake must not stand in for it")
    directory = tmp_path_factory.mktemp("libcuda")
    library = directory / "libcuda.so.1"
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([compiler, *flags, FAKES / "libcuda.c", "-o", library], check=True)
    return directory


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
