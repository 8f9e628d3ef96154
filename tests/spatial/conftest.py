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
def drive(fake_library: Path) -> Drive:
    """Builds and activates every level in a process; settings as FAKE_* variables."""

    def run(side: str = "shared", python_path: Path | None = None, **fake: object) -> Any:
        environment = os.environ | {f"FAKE_{key.upper()}": str(fake[key]) for key in fake}
        environment["LD_LIBRARY_PATH"] = str(fake_library)
        environment["CUDA_PYTHON_DISABLE_MAJOR_VERSION_WARNING"] = "1"
        if python_path:
            paths = (str(python_path), environment.get("PYTHONPATH", ""))
            environment["PYTHONPATH"] = os.pathsep.join(paths)
        command = [sys.executable, str(FAKES / "build.py"), side]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run
