"""The step-time model against machines whose step times are known."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from horizonserve.policy.batch import Load, StepModel


def machine(load: Load, slower: float = 1.0) -> float:
    """Seconds of a step: 30 ms, 3 ms a decode, 0.7 ms a prompt token, 5 ms of co-running."""
    step_s = 30e-3 + 3e-3 * load.decodes + 0.7e-3 * load.prefill_tokens
    return slower * (step_s + 0.1e-6 * load.attention + 5e-3 * load.co_run)


def mixed(rng: random.Random, co_run: bool = False) -> Load:
    decodes = rng.randint(0, 24)
    prefill_tokens = rng.choice([0, 0, 0, rng.randint(16, 512)])
    attention = decodes * rng.uniform(50, 2000) + prefill_tokens * rng.uniform(50, 1000)
    return Load(decodes, prefill_tokens, attention, co_run)


def learn(
    model: StepModel,
    loads: Callable[[], Load],
    steps: int,
    rng: random.Random,
    slower: float = 1.0,
    noise: float = 0.07,
) -> None:
    for _ in range(steps):
        load = loads()
        model.observe(load, machine(load, slower) * rng.lognormvariate(0.0, noise))


def error(model: StepModel, rng: random.Random, slower: float = 1.0) -> float:
    """Median share by which a prediction is off."""
    loads = [mixed(rng) for _ in range(200)]
    shares = [abs(model.step_s(load) / machine(load, slower) - 1) for load in loads]
    return sorted(shares)[100]


@pytest.mark.parametrize("seed", range(5))
def test_mixed_steps_teach_it_within_a_hundred(seed: int) -> None:
    rng, model = random.Random(seed), StepModel()
    learn(model, lambda: mixed(rng), 100, rng)
    assert error(model, rng) < 0.1
    assert model.solo_s == pytest.approx(33e-3, rel=0.2)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_no_prior_knows_the_machine(scale: float) -> None:
    """A GPU's steps take 1 ms, a slow CPU's seconds."""
    rng, model = random.Random(1), StepModel()
    learn(model, lambda: mixed(rng), 200, rng, slower=scale)
    assert error(model, rng, scale) < 0.15


def test_a_machine_that_becomes_twice_as_slow_is_followed_within_tens_of_steps() -> None:
    rng, model = random.Random(2), StepModel()
    learn(model, lambda: mixed(rng), 200, rng)
    learn(model, lambda: mixed(rng), 60, rng, slower=2.0)
    assert error(model, rng, 2.0) < 0.15
    learn(model, lambda: mixed(rng), 60, rng)
    assert error(model, rng) < 0.15


def test_a_constant_load_forgets_nothing_else() -> None:
    rng, model = random.Random(3), StepModel()
    learn(model, lambda: mixed(rng), 200, rng)
    prompt = Load(0, 400, 400 * 200.0)
    before_s = model.step_s(prompt)
    learn(model, lambda: Load(8, 0, 8 * 300.0), 2000, rng)
    assert model.step_s(prompt) == pytest.approx(before_s, rel=0.3)


def test_a_pause_of_the_machine_moves_it_little() -> None:
    rng, model = random.Random(4), StepModel()
    learn(model, lambda: mixed(rng), 200, rng)
    before_s = model.step_s(Load(8))
    model.observe(Load(8), 3.0)
    assert model.step_s(Load(8)) < 1.6 * before_s


def test_co_running_is_learned_apart() -> None:
    rng, model = random.Random(5), StepModel()
    learn(model, lambda: mixed(rng, co_run=rng.random() < 0.5), 400, rng, noise=0.02)
    model.co_run = False
    alone_s = model.solo_s
    model.co_run = True
    assert model.solo_s - alone_s == pytest.approx(5e-3, abs=2.5e-3)


def test_no_coefficient_is_ever_negative_or_infinite() -> None:
    rng, model = random.Random(6), StepModel()
    for _ in range(500):
        model.observe(mixed(rng, rng.random() < 0.5), rng.uniform(1e-4, 2.0))
        assert model.fixed_s >= 0 and model.decode_s(100) >= 0 and model.prefill_s(100, 0) >= 0
        assert model.step_s(Load(100, 4096, 1e7)) < 1e3
