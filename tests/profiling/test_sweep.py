"""The sweep, and what it makes of its samples, on a machine of known times."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from dataclasses import replace
from pathlib import Path

import pytest
from known_machine import CLASSES, TOKEN_S, Machine, first_s

from horizonserve.bench.result import Result
from horizonserve.profiling.fit import FEWEST, profiles
from horizonserve.profiling.plan import Cell, Grid, cells
from horizonserve.profiling.samples import Samples, SamplesError, sweep_of
from horizonserve.profiling.sweep import GIVE_UP, Effort, ServerGoneError, Sweep
from horizonserve.slo import RequestClass

pytest.importorskip("vllm")
from horizonserve.serving.profiles import curve  # noqa: E402 (only where vLLM is installed)


@pytest.fixture
def machine() -> Machine:
    return Machine()


PLAN = cells(Grid(), CLASSES)
FACTS = sweep_of(PLAN, seed=1)


def swept(machine: Machine, samples: Samples, budget_s: float = math.inf) -> tuple[Sweep, bool]:
    sweep = Sweep(PLAN, samples, machine, Effort(time.monotonic() + budget_s))
    return sweep, asyncio.run(sweep.run())


def test_every_size_of_every_class_is_measured_until_it_is_known(
    machine: Machine, tmp_path: Path
) -> None:
    samples = Samples(tmp_path / "s.jsonl", FACTS)
    _, complete = swept(machine, samples)
    found = profiles(PLAN, samples.taken(), slo_multiple=4.0)
    assert complete and list(found) == list(CLASSES)
    for name, one in found.items():
        alone_s = [first_s(cell) for cell in PLAN if cell.request_class is name]
        assert one.solo_p50_ms == pytest.approx(1e3 * sorted(alone_s)[len(alone_s) // 2], rel=0.6)
        assert one.solo_p95_ms == pytest.approx(1e3 * max(alone_s), rel=0.2)
        assert one.slo_ms == pytest.approx(4 * one.solo_p95_ms)
        assert (one.solo_p95_high_ms - one.solo_p95_low_ms) / 2 <= 0.1001 * one.solo_p95_ms
        assert all(size.samples >= FEWEST for size in one.sizes)


def test_the_stages_are_told_apart(machine: Machine, tmp_path: Path) -> None:
    machine.noise = 0.0
    samples = Samples(tmp_path / "s.jsonl", FACTS)
    swept(machine, samples)
    found = profiles(PLAN, samples.taken(), slo_multiple=5.0)
    audio = found[RequestClass.T2A]
    assert audio.per_answer_token_ms == pytest.approx(1e3 * (TOKEN_S + 0.02), rel=0.01)
    for size in audio.sizes:
        assert size.downstream_ms == pytest.approx(600 + 20 * size.answer_tokens, rel=0.01)
    assert found[RequestClass.T2T].tpot_p50_ms == pytest.approx(1e3 * TOKEN_S)
    assert found[RequestClass.T2T].per_answer_token_ms == 0


def test_the_curve_of_a_profile_gives_the_times_back(machine: Machine, tmp_path: Path) -> None:
    machine.noise = 0.0
    samples = Samples(tmp_path / "s.jsonl", FACTS)
    swept(machine, samples)
    found = profiles(PLAN, samples.taken(), slo_multiple=5.0)
    for words, answer in itertools.product((30, 100, 600), (32, 64, 128)):
        cell = Cell(RequestClass.T2A, words, answer)
        estimate_s = curve(found[RequestClass.T2A]).first_response_s(words + 7, answer)
        assert estimate_s == pytest.approx(first_s(cell), rel=0.05)


def test_it_goes_on_after_interruptions_with_the_same_result(tmp_path: Path) -> None:
    class InterruptedError_(Exception):
        pass

    def plan_of(path: Path, stops: list[int]) -> list[tuple[int, int]]:
        for stop in [*stops, 10**9]:
            machine = Machine(noise=0.0)

            def fail(_cell: Cell, machine: Machine = machine, stop: int = stop) -> None:
                if len(machine.asked) > stop:
                    raise InterruptedError_

            machine.error = fail
            samples = Samples(path, FACTS)
            try:
                swept(machine, samples)
            except InterruptedError_:
                samples.close()
        return [(sample.cell, sample.turn) for sample in samples.samples]

    whole = plan_of(tmp_path / "whole.jsonl", [])
    assert plan_of(tmp_path / "twice.jsonl", [len(PLAN) + 10, len(PLAN) + 25]) == whole


def test_a_line_that_was_cut_short_is_measured_again(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    samples = Samples(path, FACTS)
    swept(machine, samples)
    samples.close()
    path.write_text(path.read_text()[:-20])
    again = Samples(path, FACTS)
    assert len(again.samples) == len(samples.samples) - 1
    assert path.read_text().endswith("}\n")


def test_samples_of_another_sweep_are_refused(tmp_path: Path) -> None:
    Samples(tmp_path / "s.jsonl", FACTS).close()
    with pytest.raises(SamplesError, match="seed: 1, now 2"):
        Samples(tmp_path / "s.jsonl", sweep_of(PLAN, seed=2))


def test_damaged_samples_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text('{"sweep": {}}\nno json\n')
    with pytest.raises(SamplesError, match=r"damaged|another"):
        Samples(path, FACTS)


@pytest.mark.parametrize(
    "no",
    [
        "HTTP 400: no audio here",
        'HTTP 500: {"error":{"message":"At most 0 audio(s) may be provided in one prompt."}}',
    ],
)
def test_what_the_pipeline_does_not_take_is_left_out(
    machine: Machine, tmp_path: Path, no: str
) -> None:
    def error(cell: Cell) -> str | None:
        if cell.request_class is RequestClass.A2T:
            return no
        if cell.request_class is RequestClass.T2A:
            return "the stream ended without audio"
        return "HTTP 400: too long" if cell.prompt_words > 500 else None

    machine.error = error
    samples = Samples(tmp_path / "s.jsonl", FACTS)
    sweep, complete = swept(machine, samples)
    found = profiles(PLAN, samples.taken(), slo_multiple=5.0)
    assert complete and not sweep.failed
    assert list(found) == [RequestClass.T2T] and len(found[RequestClass.T2T].sizes) == 3


def test_a_class_that_always_fails_is_given_up_and_the_others_are_not(
    machine: Machine, tmp_path: Path
) -> None:
    machine.error = lambda cell: (
        "HTTP 500: no memory" if cell.request_class is RequestClass.T2A else None
    )
    samples = Samples(tmp_path / "s.jsonl", FACTS)
    sweep, _ = swept(machine, samples)
    assert sweep.failed == {RequestClass.T2A: "HTTP 500: no memory"}
    assert [c.request_class for c in machine.asked].count(RequestClass.T2A) == GIVE_UP
    assert set(profiles(PLAN, samples.taken(), 5.0)) == {RequestClass.T2T, RequestClass.A2T}


def test_when_the_budget_ends_there_is_something_of_every_class(tmp_path: Path) -> None:
    machine = Machine(noise=2.0)  # never narrow enough
    samples = Samples(tmp_path / "s.jsonl", FACTS)
    _, complete = swept(machine, samples, budget_s=1.0)
    assert not complete
    assert set(profiles(PLAN, samples.taken(), 5.0)) == set(CLASSES)


def test_what_was_measured_before_the_server_died_is_kept(tmp_path: Path) -> None:
    machine = Machine()

    def die(_cell: Cell) -> str | None:
        if len(machine.asked) > len(PLAN) + 20:
            raise ServerGoneError("gone")
        return None

    machine.error = die
    path = tmp_path / "s.jsonl"
    with pytest.raises(ServerGoneError):
        swept(machine, Samples(path, FACTS))
    assert len(Samples(path, FACTS).samples) == 20


def test_text_goes_on_with_the_rest_and_its_interval_holds_a_drift(tmp_path: Path) -> None:
    machine = Machine(noise=0.0)
    plain = Samples(tmp_path / "plain.jsonl", FACTS)
    swept(machine, plain)
    # Every size six times beside the warm-up: nothing is noisy, nothing takes longer.
    assert len(machine.asked) == (1 + FEWEST) * len(PLAN)
    steady = profiles(PLAN, plain.taken(), 5.0)[RequestClass.T2T]

    class Drifting(Machine):
        """Becomes slower by a fifth, and its speech takes any time."""

        async def __call__(self, cell: Cell, seed: int) -> Result:
            self.noise = 0.6 if cell.request_class is RequestClass.T2A else 0.0
            result = await super().__call__(cell, seed)
            assert result.first_s is not None
            slow = 1 + 0.2 * min(1.0, len(self.asked) / 300)
            return replace(result, first_s=slow * result.first_s)

    samples = Samples(tmp_path / "drift.jsonl", FACTS)
    sweep = Sweep(PLAN, samples, Drifting(), Effort(time.monotonic() + 60, precision=0.5))
    assert asyncio.run(sweep.run())
    turns = [
        {s.turn for s in samples.taken() if PLAN[s.cell].request_class is name} for name in CLASSES
    ]
    assert turns[0] == turns[1] == turns[2] and len(turns[0]) > FEWEST
    text = profiles(PLAN, samples.taken(), 5.0)[RequestClass.T2T]
    assert text.solo_p95_low_ms == pytest.approx(steady.solo_p95_ms * 1.07, rel=0.1)
    assert text.solo_p95_high_ms - text.solo_p95_low_ms > 0.03 * text.solo_p95_ms
