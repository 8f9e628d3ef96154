"""What activating a level costs beside the driver: pytest benchmarks/activation_cost.py

On the fake driver, so it is the bookkeeping only; the budget is 5 us.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "tests" / "spatial" / "fakes" / "libcuda.c"
BUDGET_S = 5e-6


class Streams:
    def wrap(self, pointer: int) -> int:
        return pointer

    def use(self, stream: int) -> AbstractContextManager[int]:
        return nullcontext(0)


def test_activation(benchmark, tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings")
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for the fake driver")
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pass
    else:
        pytest.skip("a real CUDA driver is here; the fake must not stand in for it")
    library = tmp_path / "libcuda.so.1"
    flags = ["-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([compiler, *flags, SOURCE, "-o", library], check=True)
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)

    from horizonserve.spatial.driver import Device
    from horizonserve.spatial.green import GreenBackend, Side
    from horizonserve.spatial.ladder import choose

    device = Device()
    levels = choose(device.die, device.levels())
    backend = GreenBackend(device, levels, Side.SHARED, Streams())

    def forward() -> None:
        with backend.activate(levels[0]):
            pass

    benchmark.pedantic(forward, rounds=2000, iterations=10, warmup_rounds=100)
    assert benchmark.stats.stats.median < BUDGET_S
