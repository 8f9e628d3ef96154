"""The spatial loop of a running server over time (HorizonServe, Figure 10)."""

from __future__ import annotations

import csv
import math
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Final

import numpy as np

from horizonserve.spatial.monitor import MAX_STAGES, SHARED_STAGE, Monitor
from horizonserve.spatial.stage import LINGER_S, SILENCE_S

PERIOD_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Moment:
    """What the server's record said at one time."""

    time_s: float
    #: Smoothed; nan where it is unknown.
    pressure: float
    #: Downstream stages that have work.
    active: int
    #: The shared stage's level, in SMs (or cores), and all of them.
    shared_sms: int
    total_sms: int


class Recorder:
    """Writes the record of a server to a CSV file, ten times a second, while the context lasts."""

    def __init__(self, record: str, file: Path) -> None:
        """Attach to a record.

        Args:
            record: name of the server's monitor record.
            file: written anew.
        """
        self._monitor = Monitor.attach(record)
        self._path = file
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spatial-trace", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end.set()
        self._thread.join()
        self._monitor.close()

    def _run(self) -> None:
        start_s = time.monotonic()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Moment)])
            writer.writeheader()
            while not self._end.wait(PERIOD_S):
                now_s = time.monotonic()
                if (moment := self._look(now_s, now_s - start_s)) is not None:
                    writer.writerow(asdict(moment))

    def _look(self, now_s: float, time_s: float) -> Moment | None:
        shared = self._monitor.read(SHARED_STAGE)
        if shared is None or shared.state.applied is None:
            return None
        active = [
            self._monitor.active(stage, now_s, SILENCE_S, LINGER_S)
            for stage in range(MAX_STAGES)
            if stage != SHARED_STAGE
        ]
        level = shared.levels[shared.state.applied]
        pressure = shared.state.pressure
        return Moment(
            time_s=round(time_s, 3),
            pressure=math.nan if pressure is None else round(pressure, 4),
            active=sum(map(bool, active)),
            shared_sms=level.shared_sms,
            total_sms=level.shared_sms + level.downstream_sms,
        )


def load(file: Path) -> list[Moment]:
    """The moments of a file that a ``Recorder`` wrote."""
    with file.open(newline="", encoding="utf-8") as rows:
        return [
            Moment(
                float(row["time_s"]),
                float(row["pressure"]),
                int(row["active"]),
                int(row["shared_sms"]),
                int(row["total_sms"]),
            )
            for row in csv.DictReader(rows)
        ]


def correlation(moments: Sequence[Moment], *, capped: bool) -> float:
    """Pearson's r of smoothed pressure and level; nan where one of them never changed.

    With ``capped`` over the moments at which the shared stage is on its ladder only, which is where
    Equation 1 makes the level follow the pressure.
    """
    pairs = [
        (moment.pressure, moment.shared_sms)
        for moment in moments
        if not math.isnan(moment.pressure) and (not capped or moment.shared_sms < moment.total_sms)
    ]
    if len(pairs) < 2:
        return math.nan
    pressure, level = np.array(pairs, dtype=float).T
    if not pressure.std() or not level.std():
        return math.nan
    return float(np.corrcoef(pressure, level)[0, 1])


def switches(moments: Sequence[Moment]) -> int:
    """Changes of level from one moment to the next."""
    levels = [moment.shared_sms for moment in moments]
    return sum(before != after for before, after in zip(levels, levels[1:], strict=False))


def plot(moments: Sequence[Moment], file: Path, title: str) -> None:
    """Draw activity, pressure and level over time.

    Raises:
        ImportError: matplotlib is not installed (``horizonserve[plot]``).
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, sharex=True, figsize=(9, 5.5), layout="constrained")
    time_s = [moment.time_s for moment in moments]
    for axis, values, label in (
        (axes[0], [moment.active for moment in moments], "active\ndownstream stages"),
        (axes[1], [moment.pressure for moment in moments], "smoothed\npressure"),
        (axes[2], [moment.shared_sms for moment in moments], "shared stage\nSMs or cores"),
    ):
        axis.step(time_s, values, where="post", linewidth=0.9)
        axis.set_ylabel(label)
        with suppress(ValueError):
            axis.set_ylim(0, 1.1 * np.nanmax(values))
    axes[2].set_xlabel("seconds")
    axes[0].set_title(title, fontsize=10)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
