"""The experiment driver: order, switching, idleness, resuming."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from fake import Fake, live

from horizonserve.bench import compare, saturation, solo
from horizonserve.bench import live as live_module
from horizonserve.bench.compare import Arm, Experiment, Watch
from horizonserve.bench.live import LiveError
from horizonserve.bench.metrics import Promise, Targets
from horizonserve.bench.play import Bounds
from horizonserve.bench.result import Result
from horizonserve.bench.store import Run, Store, StoreError
from horizonserve.bench.summary import ALL, ratios, rows, to_csv, to_json
from horizonserve.config import Settings
from horizonserve.slo import RequestClass
from horizonserve.workload import Mix

TARGETS = Targets({RequestClass.T2T: 1.0, RequestClass.T2A: 10.0}, tbt_s=0.5)
ARMS = (Arm("default"), Arm("edf", {"scheduler": "edf"}), Arm("horizon", {"scheduler": "horizon"}))


def experiment(**changes: Any) -> Experiment:
    values: dict[str, Any] = {
        "name": "test",
        "mix": Mix(),
        "rate_rps": 20.0,
        "duration_s": 0.5,
        "seeds": (1, 2),
        "arms": ARMS,
        "bounds": Bounds(drain_s=2.0),
    }
    return Experiment(**{**values, **changes})


def run(fake: Fake, store: Store, what: Experiment) -> list[Run]:
    async def main() -> list[Run]:
        async with live(fake) as it:
            return await compare.compare(it, store, what, Settings(slots=4), TARGETS, Watch())

    return asyncio.run(asyncio.wait_for(main(), 60.0))


def test_the_order_rotates() -> None:
    order = [(seed, arm.name) for seed, arm in experiment(seeds=(1, 2, 3)).runs()]
    assert [name for seed, name in order if seed == 1] == ["default", "edf", "horizon"]
    assert [name for seed, name in order if seed == 2] == ["edf", "horizon", "default"]
    assert [name for seed, name in order if seed == 3] == ["horizon", "default", "edf"]


def test_every_arm_plays_the_same_trace_under_its_own_settings(fake: Fake, tmp_path: Path) -> None:
    runs = run(fake, Store(tmp_path), experiment(seeds=(1,)))
    assert [one.head["arm"] for one in runs] == ["default", "edf", "horizon"]
    played = [sorted((r.index, r.at_s, r.request_class) for r in one.results) for one in runs]
    assert played[0] == played[1] == played[2] and len(played[0]) > 3
    assert [one.end["settings"].get("scheduler", "default") for one in runs] == [
        "default",
        "edf",
        "horizon",
    ]
    # One small request confirms each switch; then only requests of the trace.
    count = len(played[0]) + 1
    assert fake.answers_under == ["default"] * count + ["edf"] * count + ["horizon"] * count


def test_a_second_start_plays_only_what_is_missing(fake: Fake, tmp_path: Path) -> None:
    store = Store(tmp_path)
    first = run(fake, store, experiment())
    (tmp_path / "test/edf-seed2.jsonl").unlink()
    # What an interrupt leaves behind is not believed.
    (tmp_path / "test/edf-seed2.part").write_text('{"run": {}}\n')
    again = Fake()
    second = run(again, store, experiment())
    assert set(again.answers_under) == {"edf"}
    assert len(first) == len(second) == 6
    assert not list(tmp_path.glob("**/*.part"))


def test_an_interrupted_run_is_not_complete(fake: Fake, tmp_path: Path) -> None:
    async def main() -> None:
        async with live(fake) as it:
            what = experiment(duration_s=30.0)
            task = asyncio.create_task(
                compare.compare(it, Store(tmp_path), what, Settings(slots=4), TARGETS, Watch())
            )
            part = tmp_path / "test/default-seed1.part"
            async with asyncio.timeout(20.0):
                while not part.exists() or part.read_text().count("\n") < 10:
                    await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.sleep(0.2)
            assert fake.in_flight == 0  # it hung up

    asyncio.run(main())
    assert not list(tmp_path.glob("**/*.jsonl"))
    lines = (tmp_path / "test/default-seed1.part").read_text().splitlines()
    assert len(lines) > 5 and "result" in json.loads(lines[1])


def test_results_of_another_experiment_are_not_mixed_in(fake: Fake, tmp_path: Path) -> None:
    run(fake, Store(tmp_path), experiment(seeds=(1,)))
    with pytest.raises(StoreError, match="different rate_rps.*another results directory"):
        run(Fake(), Store(tmp_path), experiment(seeds=(1,), rate_rps=21.0))


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"run": {}}\n{"result": 3}\n{"end": {}}\n')
    with pytest.raises(StoreError, match=r"x\.jsonl: not a complete run"):
        Store(tmp_path).load("x")


def test_a_run_waits_until_the_server_is_idle(fake: Fake) -> None:
    async def main() -> float:
        async with live(fake) as it:
            fake.in_flight = 3
            asyncio.get_running_loop().call_later(1.0, setattr, fake, "in_flight", 0)
            return await it.idle()

    assert asyncio.run(main()) > 1.0


def test_a_server_that_stays_busy_is_an_error(fake: Fake) -> None:
    async def main() -> None:
        async with live(fake) as it:
            fake.in_flight = 3
            await it.idle(limit_s=0.5)

    with pytest.raises(LiveError, match="still at work"):
        asyncio.run(main())


def test_a_switch_that_is_not_confirmed_is_an_error(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_module, "_SWITCH_LIMIT_S", 0.3)
    fake.obeys = False

    async def main() -> None:
        async with live(fake) as it:
            await it.switch(Settings(scheduler="edf"))

    with pytest.raises(LiveError, match="did not confirm"):
        asyncio.run(main())


def test_solo(fake: Fake) -> None:
    async def main() -> solo.Solo:
        async with live(fake) as it:
            return await solo.measure(it, Mix(), RequestClass.T2T, count=5, limit_s=10.0)

    one = asyncio.run(main())
    assert one.count == 5 and 0.01 <= one.first_p50_s <= one.first_p95_s < 0.2
    assert one.slo_ms(5.0) == pytest.approx(5_000 * one.first_p95_s)
    assert solo.Solo.from_json("t2t", one.to_json()) == one


def test_saturation_of_a_server_that_serves_eight_in_a_tenth_of_a_second(fake: Fake) -> None:
    fake.takes_s = 0.1

    async def main() -> saturation.Saturation:
        async with live(fake) as it:
            return await saturation.measure(it, Mix(), in_flight=8, ramp_s=0.5, window_s=2.0)

    one = asyncio.run(main())
    # Never more than 8 per 0.1 s; a crowded machine serves fewer.
    assert 20 < one.rate_rps < 84
    assert saturation.Saturation.from_json(one.to_json()) == one


def test_the_runs_of_one_seed_only(fake: Fake, tmp_path: Path) -> None:
    async def main() -> None:
        async with live(fake) as it:
            for seed in (2, 1):
                await compare.compare(
                    it,
                    Store(tmp_path),
                    experiment(),
                    Settings(slots=4),
                    TARGETS,
                    Watch(),
                    only_seed=seed,
                )
                order.append(sorted(path.stem for path in tmp_path.glob("test/*.jsonl")))

    order: list[list[str]] = []
    asyncio.run(asyncio.wait_for(main(), 60.0))
    assert order[0] == ["default-seed2", "edf-seed2", "horizon-seed2"]
    assert len(order[1]) == 6


def a_run(arm: str, seed: int, firsts_s: list[float], gap_s: float = 0.1) -> Run:
    results = [
        Result.from_json(
            {
                "index": index,
                "request_class": "t2t" if index % 2 else "t2a",
                "at_s": 10.0 * index,
                "status": "ok",
                "first_s": first_s,
                "end_s": first_s + 1,
                "token_s": [first_s, first_s + gap_s] if index % 2 else [],
            }
        )
        for index, first_s in enumerate(firsts_s)
    ]
    targets = Targets(dict.fromkeys(TARGETS.slo_s, 1.0), tbt_s=0.5)
    head = experiment().head(seed, Arm(arm), targets)
    return Run(head, results, {})


def test_rows_and_ratios() -> None:
    runs = [
        a_run("default", 1, [0.5, 2, 2, 2]),
        a_run("edf", 1, [0.5, 0.5, 2, 2]),
        a_run("default", 2, [0.5, 0.5, 2, 2]),
        a_run("edf", 2, [0.5, 0.5, 0.5, 0.5]),
    ]
    table = rows(runs)
    assert [(row.arm, row.request_class) for row in table] == [
        ("default", ALL),
        ("default", "t2t"),
        ("default", "t2a"),
        ("edf", ALL),
        ("edf", "t2t"),
        ("edf", "t2a"),
    ]
    assert table[0].attainment == pytest.approx(3 / 8) and table[0].runs == 2
    assert table[0].attainment_low == 0.0 and table[0].attainment_high == 1.0
    one = ratios(runs, "edf", "default")
    assert one is not None and one.ratio == pytest.approx(2.0) and one.low <= 2.0 <= one.high
    assert ratios(runs, "edf", "horizon") is None
    both = ratios(runs, "edf", "default", Promise.BOTH)
    assert both is not None and both.ratio == one.ratio and both.promise is Promise.BOTH
    assert to_csv(table).count("\n") == 7
    assert len(json.loads(to_json(table, [one], {"kind": "test"}))["rows"]) == 6


def test_rows_count_both_promises_of_text() -> None:
    # Text answers at 0.5 s with the next token 1 s later: first response kept, the token not, and
    # with 0.9 s only for one who reads from the target on (due at 1 + 0.5 s).
    late = rows([a_run("a", 1, [0.5] * 4, gap_s=1.1)])
    early = rows([a_run("a", 1, [0.5] * 4, gap_s=0.9)])
    assert [(row.attainment, row.both, row.at_once) for row in late] == [
        (1.0, 0.5, 0.5),
        (1.0, 0.0, 0.0),
        (1.0, 1.0, 1.0),
    ]
    assert [(row.both, row.at_once) for row in early] == [(1.0, 0.5), (1.0, 0.0), (1.0, 1.0)]
    assert late[1].gap_p95_ms == pytest.approx(1_100.0) and late[2].gap_p95_ms is None
    assert [row.tbt_ms for row in late] == [None, 500.0, None]
    # Every block has the same first response, so has every draw of them.
    assert late[2].first_p95_low_s == late[2].first_p95_high_s == 0.5
