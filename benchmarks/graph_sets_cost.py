"""What a change of graph sets costs before a forward: pytest benchmarks/graph_sets_cost.py

On the real wrappers: a model of 48 layers, split at each attention, has 49 pieces beside the whole.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from horizonserve.serving.graphs import GraphSets
from horizonserve.spatial.ladder import Level

WRAPPERS = 50
LEVELS = (Level(64, 68), Level(132, 0))
BUDGET_S = 10e-6


class Ladder:
    levels = LEVELS

    def activate(self, level: Level) -> Any:
        return nullcontext()


@pytest.fixture
def sets(monkeypatch: pytest.MonkeyPatch) -> GraphSets:
    streams = iter(range(1000))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: next(streams))
    monkeypatch.setattr(type(current_platform), "_global_graph_pool", object())
    config = VllmConfig()
    wrappers = [CUDAGraphWrapper(int, config, CUDAGraphMode.PIECEWISE) for _ in range(WRAPPERS)]
    sets = GraphSets(object.__new__(GPUModelRunner), Ladder())
    sets.capture(lambda: 0)
    assert set(CUDAGraphWrapper._all_instances) == set(wrappers)
    return sets


def test_changing_the_level(benchmark: Any, sets: GraphSets) -> None:
    def there_and_back() -> None:
        for level in LEVELS:
            sets.use(level)

    benchmark.pedantic(there_and_back, rounds=2000, iterations=10, warmup_rounds=100)
    assert benchmark.stats.stats.median / len(LEVELS) < BUDGET_S


def test_keeping_the_level(benchmark: Any, sets: GraphSets) -> None:
    benchmark.pedantic(sets.use, args=(LEVELS[-1],), rounds=2000, iterations=100, warmup_rounds=100)
    assert benchmark.stats.stats.median < BUDGET_S / 10
