"""Compile a fake driver library; never where the real one is present."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CUDA = "libcuda.so.1"


def skip_beside_a_real(soname: str) -> None:
    """Skip the test where this machine has the library itself."""
    # In another process: what is loaded here stays loaded.
    load = f"import ctypes; ctypes.CDLL({soname!r})"
    if subprocess.run([sys.executable, "-c", load], capture_output=True).returncode == 0:
        pytest.skip(f"a real {soname} is present: not to be mixed with a fake one")


def compiled(source: str, soname: str, directory: Path, *gone: str) -> Path:
    """The library made of ``source``, a file beside this one, without some of its functions.

    The soname lets a program that asks for the real one find it once it is loaded.
    """
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip(f"no C compiler (gcc or cc) for the fake {soname}")
    library = directory / soname
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
    command += [f"-D{name}=gone_{name}" for name in gone]
    command += [f"-Wl,-soname,{soname}", str(Path(__file__).with_name(source)), "-o", str(library)]
    subprocess.run(command, check=True, timeout=60)
    return library


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the fake libcuda.so.1."""
    pytest.importorskip("cuda.bindings")
    skip_beside_a_real(CUDA)
    return compiled("libcuda.c", CUDA, tmp_path_factory.mktemp("libcuda")).parent
