"""The study: its parts, what it picks, and its time limit."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

from fake import ROW, Fake, live
from rich.console import Console

from horizonserve.bench.calibrate import Effort
from horizonserve.bench.compare import Arm, Watch
from horizonserve.bench.lending_study import ARMS, LendingConfig, LendingStudy
from horizonserve.bench.report import show
from horizonserve.bench.slots_study import SlotsConfig, SlotsStudy
from horizonserve.bench.store import Store
from horizonserve.bench.study import Study, StudyConfig, TimeIsUpError, best_arms, score
from horizonserve.bench.summary import ALL, Row, rows
from horizonserve.slo import RequestClass


def slots_config(**changes: Any) -> SlotsConfig:
    values: dict[str, Any] = {
        "seeds": (1,),
        "slots": (1, 4),
        "token_budgets": (1_024, 512),
        "paper_duration_s": 1.0,
        "pick_duration_s": 0.5,
        "best_loads": (1.0,),
        "best_seeds": (1,),
        "best_duration_s": 0.5,
        "effort": Effort(3, 3, class_limit_s=5.0, ramp_s=0.2, window_s=3.0),
    }
    return SlotsConfig(**{**values, **changes})


def lending_config(**changes: Any) -> LendingConfig:
    values: dict[str, Any] = {
        "seeds": (1, 2),
        "slots": (1, 4),
        "token_budgets": (1_024, 512),
        "pick_duration_s": 0.5,
        "loads": (0.5, 1.0),
        "duration_s": 0.5,
        "effort": Effort(3, 3, class_limit_s=5.0, ramp_s=0.2, window_s=3.0),
    }
    return LendingConfig(**{**values, **changes})


def study(fake: Fake, store: Store, config: StudyConfig, until_s: float = math.inf) -> Study:
    kind: type[Study] = LendingStudy if isinstance(config, LendingConfig) else SlotsStudy
    fake.takes_s = 0.5  # a saturation of about 32 requests per second
    it: list[Study] = []

    async def main() -> None:
        async with live(fake) as server:
            it.append(kind(config, server, store, Watch(), until_s))
            await it[0].run()

    try:
        asyncio.run(asyncio.wait_for(main(), 120.0))
    except TimeIsUpError as error:
        assert "start it again" in str(error)
    return it[0]


def picked(done: Study) -> list[str]:
    """The best arm of each policy, of equals the first; a busy machine may break any's promise."""
    kept = [
        row
        for name in ("pick-slots", "pick-budget")
        for row in rows(done.runs[name])
        if row.request_class == ALL
    ]
    policies = dict.fromkeys(row.arm.split("-")[0] for row in kept)
    return [
        max((row for row in kept if row.arm.split("-")[0] == policy), key=score).arm
        for policy in policies
    ]


def test_a_study_plays_every_policy_at_four_slots_and_at_its_best(
    fake: Fake, tmp_path: Path
) -> None:
    done = study(fake, Store(tmp_path), slots_config())
    assert list(done.runs) == ["paper", "pick-slots", "pick-budget", "best-1x"]
    assert [run.head["arm"] for run in done.runs["paper"]] == [
        "default-4s",
        "edf-4s",
        "horizon-4s-no-lending",
    ]
    assert [run.head["arm"] for run in done.runs["pick-slots"]][:2] == [
        "default-1s-1024t",
        "default-4s-1024t",
    ]
    assert [run.head["arm"] for run in done.runs["best-1x"]] == picked(done)
    assert done.base is not None and done.base.slo_t2t_ms is not None
    console = Console(file=StringIO(), width=80)
    show(console, done)
    assert (tmp_path / "tables.csv").read_text().count("\n") > 20
    again = Fake()
    study(again, Store(tmp_path), slots_config())
    assert len(again.answers_under) <= 2  # only the request that confirms the targets


def test_a_study_whose_time_is_up_keeps_what_it_has(fake: Fake, tmp_path: Path) -> None:
    config = slots_config(parts=("a",), paper_duration_s=0.5)
    done = study(fake, Store(tmp_path), config, until_s=0.0)
    assert done.runs == {"paper": []} and done.calibration is not None
    show(Console(file=StringIO()), done)
    assert len(study(Fake(), Store(tmp_path), config).runs["paper"]) == 3


class Order(Watch):
    """Notes the runs that are played."""

    def __init__(self) -> None:
        self.names: list[str] = []

    @contextlib.contextmanager
    def step(self, name: str, _guess_s: float) -> Iterator[Callable[[str], None]]:
        if "/" in name:
            self.names.append(name)
        yield lambda _text: None


def order(fake: Fake, store: Store, config: LendingConfig) -> tuple[list[str], LendingStudy]:
    fake.takes_s = 0.2
    watch = Order()
    it: list[LendingStudy] = []

    async def main() -> None:
        async with live(fake) as server:
            it.append(LendingStudy(config, server, store, watch, math.inf))
            await it[0].run()

    asyncio.run(asyncio.wait_for(main(), 180.0))
    return watch.names, it[0]


def test_the_lending_study_plays_all_rates_of_a_seed_before_the_next(
    fake: Fake, tmp_path: Path
) -> None:
    config = lending_config(parts=("rates",))
    names, done = order(fake, Store(tmp_path), config)
    default, edf = picked(done)
    assert names == [
        *(f"pick-slots/{p}-{slots}s-1024t-seed100" for p in ("default", "edf") for slots in (1, 4)),
        *(f"pick-budget/{'-'.join(arm.split('-')[:2])}-512t-seed100" for arm in (default, edf)),
        *(f"rate-0.5x/{arm}-seed1" for arm in (default, edf, "horizon")),
        *(f"rate-1x/{arm}-seed1" for arm in (default, edf, "horizon")),
        *(f"rate-0.5x/{arm}-seed2" for arm in (edf, "horizon", default)),
        *(f"rate-1x/{arm}-seed2" for arm in (edf, "horizon", default)),
    ]
    horizon = next(run for run in done.runs["rate-1x"] if run.head["arm"] == "horizon")
    assert horizon.end["settings"]["slots"] is None
    assert done.base is not None and done.calibration is not None
    assert done.base.tbt_text_ms == done.calibration.tbt_ms == horizon.head["tbt_ms"]
    text = done.calibration.solos[RequestClass.T2T]
    assert text.tpot_p50_s is not None and done.calibration.tbt_ms is not None
    assert abs(done.calibration.tbt_ms - 1_500 * text.tpot_p50_s) < 0.06
    show(Console(file=StringIO(), width=80), done)
    plain = json.loads((tmp_path / "tables.json").read_text())
    assert [(one["experiment"], one["promise"]) for one in plain["ratios"]] == [
        (name, promise)
        for name in ("rate-0.5x", "rate-1x")
        for promise in ("first response", "both promises")
    ]
    (tmp_path / f"rate-1x/{edf}-seed1.jsonl").unlink()
    again, _ = order(Fake(), Store(tmp_path), config)
    assert again == [f"rate-1x/{edf}-seed1"]


def test_the_ablation_changes_one_rule_of_horizon_at_a_time(fake: Fake, tmp_path: Path) -> None:
    names, done = order(fake, Store(tmp_path), lending_config(parts=("ablation",), seeds=(1,)))
    assert names == [f"ablation/{arm.name}-seed1" for arm in ARMS]
    changed = [
        {k for k, v in run.head["changes"].items() if v is not None} - {"scheduler"}
        for run in done.runs["ablation"]
    ]
    assert changed[0] == set()
    singles = [{"lending"}, {"lost"}, {"rotation"}, {"slack_guard"}, {"long_cap"}]
    assert changed[1:6] == singles
    assert changed[6] == {"rotation", "slack_guard", "long_cap"}
    show(Console(file=StringIO(), width=80), done)
    ratios = json.loads((tmp_path / "tables.json").read_text())["ratios"]
    assert len(ratios) == 2 * (len(ARMS) - 1) and {one["arm"] for one in ratios} == {"horizon"}


def test_the_best_keeps_most_of_both_counts() -> None:
    def row(arm: str, both: float, first: float) -> Row:
        return replace(ROW, arm=arm, both=both, attainment=first)

    def best(*rows: Row) -> str:
        scores = {one.arm: score(one) for one in rows}
        return best_arms({"edf": [Arm(one.arm) for one in rows]}, scores)["edf"].name

    assert best(row("a", 0.5, 0.7), row("b", 0.6, 0.7)) == "b"
    assert best(row("a", 0.5, 1.0), row("b", 0.6, 0.7)) == "a"
    assert best(row("a", 0.5, 0.7), row("b", 0.5, 0.9)) == "b"
    assert best(row("a", 0.5, 0.7), row("b", 0.5, 0.7)) == "a"
