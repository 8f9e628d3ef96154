"""The partition search against the optimum of a machine whose kernels come in waves."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import mean

import pytest

from horizonserve.lora.search import search

LAYERS = 32
FORK_JOIN_US = 4.0
#: Output width, input width, slices of QKV, O, Gate/Up and Down.
SHAPES = {
    "llama3-8b": [(6144, 4096, 3), (4096, 4096, 1), (28672, 4096, 2), (4096, 14336, 1)],
    "qwen2.5-7b": [(4608, 3584, 3), (3584, 3584, 1), (37888, 3584, 2), (3584, 18944, 1)],
}
BATCHES = (1, 8, 16, 32, 64, 128, 256, 384)
RANKS = (16, 32, 64)


def waves(blocks: int, at_once: int) -> int:
    return -(-blocks // at_once)


@dataclass
class Pair:
    """A base layer and its LoRA layer on a device; times in microseconds.

    Kernels run in waves of as many blocks as SMs hold; a base layer needs ``sat`` SMs for the whole
    memory bandwidth; side by side they slow one another where memory bounds them.
    """

    total_sms: int
    base_blocks: int
    base_wave_us: float
    base_memory_us: float
    saturating_sms: float
    shrink_blocks: int
    shrink_wave_us: float
    expand_blocks: int
    expand_wave_us: float
    occupancy: int
    rest_us: float
    noise: float
    chance: random.Random
    runs: int = 0

    def base_us(self, sms: int) -> float:
        memory_us = self.base_memory_us / min(1.0, sms / self.saturating_sms)
        return max(waves(self.base_blocks, sms) * self.base_wave_us, memory_us) + 3

    def lora_us(self, sms: int) -> float:
        at_once = sms * self.occupancy
        shrink_us = waves(self.shrink_blocks, at_once) * self.shrink_wave_us
        return shrink_us + waves(self.expand_blocks, at_once) * self.expand_wave_us + 6

    def step_us(self, base_sms: int, lora_sms: int) -> float:
        base_us, lora_us = self.base_us(base_sms), self.lora_us(lora_sms)
        bound = min(1.0, self.base_memory_us / base_us)
        layer_us = max(base_us, lora_us) + 0.15 * min(base_us, lora_us) * bound
        return self.rest_us + LAYERS * (layer_us + FORK_JOIN_US)

    @property
    def sequential_us(self) -> float:
        both_us = self.base_us(self.total_sms) + self.lora_us(self.total_sms)
        return self.rest_us + LAYERS * both_us

    def measure(self, base_sms: int, lora_sms: int) -> float:
        self.runs += 1
        return self.step_us(base_sms, lora_sms) * (1 + self.chance.gauss(0, self.noise))


def pairs(total_sms: int, noise: float, seeds: int) -> Iterator[Pair]:
    for seed in range(seeds):
        for index, (width, depth, slices) in enumerate(
            shape for shapes in SHAPES.values() for shape in shapes
        ):
            for batch in BATCHES:
                for rank in RANKS:
                    chance = random.Random(hash((seed, index, batch, rank)))
                    rows = 64 if batch <= 64 else 128
                    columns = chance.choice([64, 128, 128, 256])
                    splits = chance.choice([1, 1, 2, 4]) if width <= 8192 else 1
                    lora_rows = 16 if batch <= 64 else 32
                    yield Pair(
                        total_sms,
                        waves(batch, rows) * waves(width, columns) * splits,
                        2 * rows * columns * depth / splits / 2.4e6 + chance.uniform(1, 3),
                        2 * width * depth / 1.6e6,
                        chance.uniform(0.35, 0.6) * total_sms,
                        waves(batch, lora_rows) * chance.choice([8, 16, 32]) * slices,
                        chance.uniform(2, 5),
                        waves(batch, lora_rows) * waves(width // slices, 128) * slices,
                        chance.uniform(1, 2.5) * rank / 16 + 0.8,
                        chance.choice([1, 2, 2, 4]),
                        8_000 + 20 * batch,
                        noise,
                        chance,
                    )


def found(pair: Pair, counts: list[int]) -> tuple[float, float]:
    """What the search's choice takes, and what the best one would."""
    chosen = search(
        {k: pair.base_us(k) for k in counts},
        {k: pair.lora_us(k) for k in counts},
        pair.measure,
        pair.sequential_us,
        pair.total_sms,
    )
    got_us = pair.sequential_us if chosen is None else pair.step_us(*chosen[:2])
    together_us = min(
        pair.step_us(b, l) for b in counts for l in counts if b + l <= pair.total_sms
    )
    return got_us, min(together_us, pair.sequential_us)


@pytest.mark.parametrize(
    ("total_sms", "step", "least", "most_runs"), [(108, 2, 4, 16), (132, 8, 8, 9)]
)
@pytest.mark.parametrize("noise", [0.0, 0.003])
def test_near_the_optimum_in_few_measurements(
    total_sms: int, step: int, least: int, most_runs: int, noise: float
) -> None:
    counts = list(range(least, total_sms, step))
    losses, runs = [], []
    for pair in pairs(total_sms, noise, seeds=3):
        got_us, best_us = found(pair, counts)
        losses.append(got_us / best_us - 1)
        runs.append(pair.runs)
        if noise == 0:
            assert got_us <= pair.sequential_us
    assert mean(loss <= 0.01 for loss in losses) >= 0.854
    assert mean(loss <= 0.03 for loss in losses) >= 0.99
    assert mean(runs) <= most_runs


def test_a_pair_is_measured_once_and_fits_the_device() -> None:
    asked: list[tuple[int, int]] = []

    def measure(base_sms: int, lora_sms: int) -> float:
        asked.append((base_sms, lora_sms))
        return abs(base_sms - 60) + abs(lora_sms - 30) + 1.0

    counts = range(8, 132, 8)
    base = {k: 1 + 100 / k for k in counts}
    lora = {k: 1 + 40 / k for k in counts}
    search(base, lora, measure, math.inf, 132)
    assert len(asked) == len(set(asked))
    assert all(b + l <= 132 for b, l in asked)


def test_none_where_one_after_the_other_is_as_good() -> None:
    curve = {k: 1.0 for k in (8, 16, 24)}
    assert search(curve, curve, lambda *_: 2.0, 2.0, 32) is None
    assert search(curve, curve, lambda *_: 2.0, 2.1, 32) is not None


@pytest.mark.parametrize(
    ("base", "lora", "total"),
    [({}, {}, 32), ({8: 1.0}, {16: 1.0}, 32), ({24: 1.0}, {24: 1.0}, 32)],
)
def test_curves_that_do_not_fit(
    base: dict[int, float], lora: dict[int, float], total: int
) -> None:
    with pytest.raises(ValueError, match="fits twice"):
        search(base, lora, lambda *_: 1.0, 2.0, total)
