"""What the scheduler wrapper costs, on the real OmniAR scheduler: 64 running, 256 waiting.

    python -m pytest benchmarks/wrapper_cost.py --benchmark-columns=median,iqr,rounds

Stock and wrapped steps alternate on twin schedulers, so that what the machine does meanwhile hits
both; the difference of a pair is what counts. Who goes first alternates too: a second step finds
warmer caches, which is worth more than the wrapper costs. Limits are asserted well above the goals:
a shared machine is no stopwatch.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "serving"))

from engine import answer, make_request, make_scheduler, step  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.request import RequestStatus  # noqa: E402
from vllm_omni.core.sched.omni_ar_scheduler import OmniARScheduler  # noqa: E402
from vllm_omni.engine.serialization import serialize_additional_information  # noqa: E402

from horizonserve import instance  # noqa: E402
from horizonserve.serving.schedulers import HorizonARScheduler  # noqa: E402

RUNNING, FREE = 64, 4
PAIRS = 300
#: The paper's policy: the same requests advance as behind the stock scheduler.
LITERAL = {"scheduler": "horizon", "lending": False}


@pytest.fixture(autouse=True)
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(instance, "DIRECTORY", tmp_path)
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Twin:
    """A scheduler in a state that every step finds again."""

    def __init__(self, cls: type, waiting: int, *, running: int = RUNNING, **settings: Any) -> None:
        far = {"slo_text_ms": 1e6, "slo_audio_ms": 1e7, "long_cap": False}
        self.scheduler = make_scheduler(
            cls,
            slots=running + FREE,
            token_budget=4096,
            blocks=40_000,
            additional_config={"horizon": far | settings},
        )
        self.added = 0
        self._add(running)
        while len(self.scheduler.running) < running:
            step(self.scheduler)
        self.keep = set(self.scheduler.running)
        self._add(waiting)

    def _add(self, count: int, kinds: str = "lss") -> None:
        for _ in range(count):
            self.added += 1
            name = f"{kinds[self.added % len(kinds)]}{self.added}"
            self.scheduler.add_request(make_request(name, prompt_tokens=20, output_tokens=5000))

    def step_s(self) -> float:
        """Time one step, then put back what it took."""
        began_s = time.perf_counter()
        output = self.scheduler.schedule()
        took_s = time.perf_counter() - began_s
        answer(self.scheduler, output)
        new = [r.request_id for r in self.scheduler.running if r not in self.keep]
        assert len(new) == FREE
        self.scheduler.finish_requests(new, RequestStatus.FINISHED_ABORTED)
        for name in new:
            self._add(1, name[0])
        return took_s


def compare(benchmark: Any, waiting: int, **settings: Any) -> float:
    """Median over alternating pairs of what a wrapped step takes more than a stock one, s."""
    stock, ours = Twin(OmniARScheduler, waiting), Twin(HorizonARScheduler, waiting, **settings)
    for twin in (stock, ours):
        for _ in range(10):
            twin.step_s()
    pairs = []

    def two_pairs() -> None:
        first_s, then_ours_s = stock.step_s(), ours.step_s()
        first_ours_s, then_s = ours.step_s(), stock.step_s()
        pairs.append(((first_s + then_s) / 2, (first_ours_s + then_ours_s) / 2))

    benchmark.pedantic(two_pairs, rounds=PAIRS)
    more_s = statistics.median(after - before for before, after in pairs)
    base_s = statistics.median(before for before, _ in pairs)
    benchmark.extra_info.update(stock_us=base_s * 1e6, more_us=more_s * 1e6)
    print(
        f"\n{settings or 'stock'}, {waiting} waiting: stock schedule() {base_s * 1e6:.0f} us,"
        f" ours {more_s * 1e6:+.1f} us ({more_s / base_s:+.1%})"
    )
    ours.scheduler.shutdown()
    return more_s / base_s


def test_a_step_with_the_policy_off(benchmark: Any) -> None:
    assert compare(benchmark, 256, scheduler="default") <= 0.02


@pytest.mark.parametrize("settings", [{"scheduler": "edf"}, LITERAL], ids=["edf", "literal"])
def test_a_step_behind_a_view(benchmark: Any, settings: dict[str, Any]) -> None:
    assert compare(benchmark, 256, **settings) <= 0.20


def test_a_step_behind_a_view_of_a_thousand(benchmark: Any) -> None:
    compare(benchmark, 1000, **LITERAL)
    assert benchmark.extra_info["more_us"] <= 1000


@pytest.mark.parametrize("running", [64, 384])
def test_a_plan_alone(benchmark: Any, running: int) -> None:
    """Who advances among those that run, with four that wait."""
    scheduler = Twin(HorizonARScheduler, FREE, running=running, scheduler="horizon").scheduler

    def plan() -> None:
        waiting = scheduler._jobs(scheduler._choose(FREE))
        scheduler._lending.plan(scheduler._jobs(scheduler.running), waiting, scheduler._clock())

    benchmark(plan)
    median_s = benchmark.stats.stats.median
    print(f"\na plan of {running} running: {median_s * 1e6:.0f} us")
    assert median_s <= 10e-3


@pytest.mark.parametrize("waiting", [256, 1000])
def test_the_queue_view_alone(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, waiting: int
) -> None:
    """Choosing, showing and putting back, around a stock loop that takes what it is shown."""
    scheduler = Twin(HorizonARScheduler, waiting, **LITERAL).scheduler
    taken: list[Any] = []

    def loop(self: Any, throttle_prefills: bool = False) -> None:
        taken.extend(self.waiting.pop_request() for _ in range(FREE))

    def restore() -> None:
        while taken:
            request = taken.pop()
            scheduler.waiting.append(request)
            scheduler._fresh.add(request)

    def view() -> None:
        scheduler._schedule_view(False, scheduler._choose(FREE))

    monkeypatch.setattr(Scheduler, "schedule", loop)
    benchmark.pedantic(view, setup=restore, rounds=1000)
    assert benchmark.stats.stats.median <= 1e-3


def test_classification(benchmark: Any) -> None:
    scheduler = make_scheduler(HorizonARScheduler, additional_config={"horizon": {}})
    request = make_request("l1")
    request.additional_information = serialize_additional_information(
        {"omni_final_stage_id": 2, "global_request_id": ["chatcmpl-0123456789abcdef"]}
    )
    admit, present = scheduler._admission.admit, scheduler.requests
    benchmark(admit, request, present)
    assert benchmark.stats.stats.median <= 8e-6
