"""The trace of the loop: from a record to CSV, figures and a plot."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest

from horizonserve.bench.spatial_trace import (
    Moment,
    Recorder,
    correlation,
    load,
    plot,
    switches,
)
from horizonserve.spatial import monitor as module
from horizonserve.spatial.ladder import Level
from horizonserve.spatial.monitor import VARIABLE, Monitor, State

LEVELS = (Level(16, 116, 1), Level(80, 52, 2), Level(132, 0))


def test_a_recorded_trace_says_what_the_stages_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DIRECTORY", tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)
    record = Monitor.create()
    shared, downstream = record.claim(0, LEVELS), record.claim(2, LEVELS)
    file = tmp_path / "a" / "trace.csv"
    with Recorder(record.path.name, file):
        time.sleep(0.25)  # nothing has run yet: nothing to note
        for level, pressure, active in ((2, None, False), (0, 0.2, True), (1, 0.9, True)):
            now_s = time.monotonic()
            shared.publish(State(False, now_s, level, level, 0, pressure, now_s), now_s)
            downstream.publish(State(active=active), now_s)
            time.sleep(0.35)
    record.close()
    moments = load(file)
    seen = list(dict.fromkeys((m.shared_sms, m.active, m.total_sms) for m in moments))
    assert seen == [(132, 0, 132), (16, 1, 132), (80, 1, 132)]
    assert math.isnan(moments[0].pressure) and moments[-1].pressure == 0.9
    assert moments[0].time_s >= 0.2 and switches(moments) == 2


def moments(*pairs: tuple[float, int]) -> list[Moment]:
    return [Moment(float(at), b, 1, sms, 132) for at, (b, sms) in enumerate(pairs)]


def test_correlation() -> None:
    rising = moments((0.1, 16), (0.5, 48), (0.9, 80))
    assert correlation(rising, capped=True) == pytest.approx(1.0)
    with_whole = [*rising, *moments((0.0, 132), (math.nan, 132))]
    assert correlation(with_whole, capped=True) == pytest.approx(1.0)
    assert correlation(with_whole, capped=False) < 0.5
    assert math.isnan(correlation(moments((0.1, 16), (0.9, 16)), capped=True))
    assert math.isnan(correlation([], capped=False))


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "loop.png"
    plot(moments((0.1, 16), (math.nan, 132), (0.9, 80)), file, "a title")
    assert file.read_bytes().startswith(b"\x89PNG")
