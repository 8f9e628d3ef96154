"""The study: its parts, what it picks, and its time limit."""

from __future__ import annotations

import asyncio
import math
from io import StringIO
from pathlib import Path
from typing import Any

from fake import Fake, live
from rich.console import Console

from horizonserve.bench.calibrate import Effort
from horizonserve.bench.compare import Watch
from horizonserve.bench.report import show
from horizonserve.bench.store import Store
from horizonserve.bench.study import Study, StudyConfig, TimeIsUpError


def study_config(**changes: Any) -> StudyConfig:
    values: dict[str, Any] = {
        "seeds": (1,),
        "slots": (1, 4),
        "token_budgets": (1_024, 512),
        "paper_duration_s": 1.0,
        "pick_duration_s": 0.5,
        "best_loads": (1.0,),
        "best_seeds": (1,),
        "best_duration_s": 0.5,
        "effort": Effort(3, 3, class_limit_s=5.0, ramp_s=0.2, window_s=1.0),
    }
    return StudyConfig(**{**values, **changes})


def study(fake: Fake, store: Store, config: StudyConfig, until_s: float = math.inf) -> Study:
    fake.takes_s = 0.5  # a saturation of about 32 requests per second
    it: list[Study] = []

    async def main() -> None:
        async with live(fake) as server:
            it.append(Study(config, server, store, Watch(), until_s))
            await it[0].run()

    try:
        asyncio.run(asyncio.wait_for(main(), 120.0))
    except TimeIsUpError as error:
        assert "start it again" in str(error)
    return it[0]


def test_a_study_plays_every_policy_at_four_slots_and_at_its_best(
    fake: Fake, tmp_path: Path
) -> None:
    done = study(fake, Store(tmp_path), study_config())
    assert list(done.runs) == ["paper", "pick-slots", "pick-budget", "best-1x"]
    assert [run.head["arm"] for run in done.runs["paper"]] == [
        "default-4s",
        "edf-4s",
        "horizon-4s",
    ]
    assert [run.head["arm"] for run in done.runs["pick-slots"]][:2] == [
        "default-1s-1024t",
        "default-4s-1024t",
    ]
    # The fake answers everything in time: the first of equals wins.
    assert [run.head["changes"]["slots"] for run in done.runs["best-1x"]] == [1, 1, 1]
    assert done.base is not None and done.base.slo_t2t_ms is not None
    console = Console(file=StringIO(), width=80)
    show(console, done)
    assert (tmp_path / "tables.csv").read_text().count("\n") > 20
    again = Fake()
    study(again, Store(tmp_path), study_config())
    assert len(again.answers_under) <= 2  # only the request that confirms the targets


def test_a_study_whose_time_is_up_keeps_what_it_has(fake: Fake, tmp_path: Path) -> None:
    config = study_config(parts=("a",), paper_duration_s=0.5)
    done = study(fake, Store(tmp_path), config, until_s=0.0)
    assert done.runs == {"paper": []} and done.calibration is not None
    show(Console(file=StringIO()), done)
    assert len(study(Fake(), Store(tmp_path), config).runs["paper"]) == 3
