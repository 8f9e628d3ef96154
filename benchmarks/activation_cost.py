"""What activating a level costs beside the driver: pytest benchmarks/activation_cost.py

On the fake driver, so it is the bookkeeping only; the budget is 5 us.
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "spatial" / "fakes"))

from fake_driver import compiled, skip_beside_a_real  # noqa: E402

CUDA = "libcuda.so.1"
BUDGET_S = 5e-6


class Streams:
    def wrap(self, pointer: int) -> int:
        return pointer

    def use(self, stream: int) -> AbstractContextManager[int]:
        return nullcontext(0)


def test_activation(benchmark, tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings")
    skip_beside_a_real(CUDA)
    ctypes.CDLL(str(compiled("libcuda.c", CUDA, tmp_path)), ctypes.RTLD_GLOBAL)

    from horizonserve.spatial.driver import Device
    from horizonserve.spatial.green import GreenBackend
    from horizonserve.spatial.ladder import Side, choose

    device = Device()
    levels = choose(device.die, device.levels())
    backend = GreenBackend(device, levels, Side.SHARED, Streams())

    def forward() -> None:
        with backend.activate(levels[0]):
            pass

    benchmark.pedantic(forward, rounds=2000, iterations=10, warmup_rounds=100)
    assert benchmark.stats.stats.median < BUDGET_S
