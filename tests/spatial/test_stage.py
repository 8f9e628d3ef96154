"""The loop of the stages: real records, levels that are only noted down, a clock of our own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from horizonserve.config import Settings
from horizonserve.spatial import monitor as module
from horizonserve.spatial import stage
from horizonserve.spatial.ladder import Level
from horizonserve.spatial.monitor import VARIABLE, Monitor, State
from horizonserve.spatial.null import NullBackend
from horizonserve.spatial.stage import LINGER_S, LOOK_S, DownstreamStage, SharedStage, Stage

LEVELS = (Level(16, 116, 1), Level(48, 84, 2), Level(80, 52, 3), Level(132, 0))
LOW, MIDDLE, CAP, WHOLE = range(4)
SETTINGS = Settings(scheduler="horizon", b_sat=0.8, min_dwell_s=1.0)


class Server:
    """A shared stage and one downstream stage, on one clock."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.pressure: float | None = 0.0
        self.shared = SharedStage(
            NullBackend(LEVELS), Monitor.attach(), lambda _: self.pressure, SETTINGS, self.clock
        )
        self.downstream = self.stage(2)

    def clock(self) -> float:
        return self.now_s

    def stage(self, index: int, levels: tuple[Level, ...] = LEVELS) -> DownstreamStage:
        return DownstreamStage(index, NullBackend(levels), Monitor.attach(), self.clock)

    def level_of(self, stage: Stage) -> int:
        """The level of its next forward."""
        with stage.forward():
            pass
        assert isinstance(stage.backend, NullBackend)
        return LEVELS.index(stage.backend.decisions[-1])

    def step(self, after_s: float, pressure: float | None = 0.0) -> tuple[int, int]:
        """Levels of both stages when, after a while, both take a step."""
        self.now_s += after_s
        self.pressure = pressure
        return self.level_of(self.shared), self.level_of(self.downstream)


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Monitor]:
    monkeypatch.setattr(module, "DIRECTORY", tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)
    made = Monitor.create()
    yield made
    made.close()


@pytest.fixture
def server(record: Monitor) -> Iterator[Server]:
    made = Server()
    yield made
    made.shared.close()
    made.downstream.close()


def test_downstream_follows_the_level_that_pressure_chose(server: Server) -> None:
    # The shared stage has not seen downstream work yet when it takes its first step; the first
    # step downstream leaves it room all the same.
    assert server.step(0) == (WHOLE, CAP)
    assert server.step(0.05, 0.1) == (LOW, LOW)
    seen = [server.step(0.0625, 0.9) for _ in range(17)]
    assert seen == [(LOW, LOW)] * 15 + [(CAP, CAP)] * 2  # a dwell later


def test_the_whole_comes_back_when_downstream_has_been_idle(server: Server) -> None:
    server.step(0)
    assert server.step(0.05) == (LOW, LOW)
    server.now_s += LINGER_S + 1.1
    assert server.level_of(server.shared) == WHOLE


def test_downstream_has_all_where_the_shared_stage_is_idle_too(server: Server) -> None:
    server.step(0)
    assert server.step(0.05) == (LOW, LOW)
    server.now_s += LINGER_S / 2
    assert server.level_of(server.downstream) == LOW
    server.now_s += LINGER_S
    assert server.level_of(server.downstream) == WHOLE
    # Sampling is work too: it may wait for what the forward launched.
    with server.shared.again():
        server.now_s += 2 * LINGER_S
        assert server.level_of(server.downstream) == LOW


@pytest.mark.parametrize("pressure", [0.0, 0.4, 0.9])
def test_a_long_forward_that_finds_the_shared_stage_uncapped_is_disjoint_from_its_rungs(
    server: Server, pressure: float
) -> None:
    assert server.level_of(server.shared) == WHOLE
    with server.downstream.forward():  # an image
        image = server.downstream.backend.decisions[-1]  # type: ignore[attr-defined]
        server.pressure = pressure
        server.now_s += LOOK_S
        mine = LEVELS[server.level_of(server.shared)]
        assert not mine.whole and mine.shared_sms + image.downstream_sms <= 132


def test_a_forward_that_takes_long_is_active_all_the_while(server: Server) -> None:
    server.step(0)
    with server.downstream.forward():
        server.now_s += 30.0
        assert server.level_of(server.shared) == LOW
    server.now_s += LINGER_S + 1.1
    assert server.level_of(server.shared) == WHOLE


def test_an_empty_step_is_no_activity_and_no_change(server: Server) -> None:
    with server.downstream.forward(work=False), server.shared.forward(work=False):
        pass
    assert not server.shared.backend.decisions  # type: ignore[attr-defined]
    server.now_s += 0.05
    assert server.level_of(server.shared) == WHOLE


def test_sampling_has_the_level_of_its_forward(server: Server) -> None:
    server.step(0)
    assert server.level_of(server.shared) == LOW
    server.now_s += 30
    with server.shared.again():
        pass
    assert server.shared.backend.decisions[-1] == LEVELS[LOW]  # type: ignore[attr-defined]


def test_the_switch_is_live(server: Server) -> None:
    server.step(0)
    assert server.step(0.05) == (LOW, LOW)
    server.shared.use(SETTINGS.changed({"spatial": False}))
    assert server.step(0.05)[0] == WHOLE
    assert server.step(LOOK_S) == (WHOLE, WHOLE)
    # Spatial control is half of horizon; another scheduler runs without it.
    server.shared.use(SETTINGS.changed({"scheduler": "edf"}))
    assert server.step(0.05) == (WHOLE, WHOLE)
    server.shared.use(SETTINGS)
    assert server.step(0.05) == (LOW, LOW)


def test_the_record_tells_what_was_decided_and_by_what(server: Server, record: Monitor) -> None:
    server.step(0)
    server.step(0.05, 0.9)
    with server.shared.forward():
        assert (reading := record.read(0)) is not None and reading.state.active
    assert (reading := record.read(0)) is not None
    assert reading.state == State(False, server.now_s, CAP, CAP, 1, 0.9, server.now_s)
    assert (reading := record.read(2)) is not None
    assert reading.state == State(False, server.now_s, CAP, CAP, 1)


def test_unknown_pressure_holds_the_level(server: Server) -> None:
    server.step(0)
    assert server.step(0.05, 0.4) == (MIDDLE, MIDDLE)
    for _ in range(30):
        assert server.step(0.09, None) == (MIDDLE, MIDDLE)


def test_a_shared_stage_that_is_gone_caps_nobody(server: Server, record: Monitor) -> None:
    server.step(0)
    assert server.step(0.05) == (LOW, LOW)
    server.shared.close()
    assert server.level_of(server.downstream) == LOW  # may be a damaged moment
    server.now_s += LOOK_S
    assert server.level_of(server.downstream) == WHOLE


def test_another_split_stops_it_for_all(
    server: Server, record: Monitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(stage.logger, "warning", lambda text, *more: said.append(text % more))
    server.step(0)
    assert server.step(0.05) == (LOW, LOW)
    server.stage(1, (Level(16, 116, 9), *LEVELS[1:]))
    for _ in range(3):
        server.step(LOOK_S)
    assert server.step(0) == (WHOLE, WHOLE)
    assert "stage 1 has another split" in (record.vetoed() or "")
    assert len(said) == 1 and "spatial control stops" in said[0]  # loudly, and once


def test_a_veto_stops_it_for_all(server: Server, record: Monitor) -> None:
    server.step(0)
    assert server.step(0.05) == (LOW, LOW)
    record.veto("stage 1: CUDA graphs")
    assert server.step(LOOK_S) == (WHOLE, WHOLE)
    assert server.shared.refused == server.downstream.refused == "stage 1: CUDA graphs"


@pytest.mark.parametrize("entering", [True, False])
def test_a_cap_that_fails_costs_no_forward(
    server: Server, record: Monitor, entering: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def __enter__(self) -> None:
            raise RuntimeError("cuEventRecord: 700")

        def __exit__(self, *_: object) -> None: ...

    def activate(level: Level) -> AbstractContextManager[None]:
        if entering:
            return Broken()
        raise RuntimeError("cuEventRecord: 700")

    server.step(0)
    monkeypatch.setattr(server.downstream.backend, "activate", activate)
    forwards = []
    for _ in range(2):
        with server.downstream.forward():
            forwards.append(server.now_s)
    assert len(forwards) == 2
    assert record.vetoed() == "stage 2: cuEventRecord: 700"
    server.now_s += LOOK_S
    assert server.level_of(server.shared) == WHOLE


def test_the_forwards_own_error_comes_through(server: Server, record: Monitor) -> None:
    with pytest.raises(KeyError), server.downstream.forward():
        raise KeyError
    assert (reading := record.read(2)) is not None and not reading.state.active


def test_a_ladder_without_a_rung_caps_nothing(record: Monitor) -> None:
    with pytest.raises(ValueError, match="s_min_sms"):
        DownstreamStage(1, NullBackend(LEVELS[-1:]), record)
