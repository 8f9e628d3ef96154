"""What every comparison starts with: solo times, the targets that follow, the saturation rate.

All three are noted in the results directory, so that an experiment that goes on uses the targets
and rates it began with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from horizonserve.bench import saturation, solo
from horizonserve.bench.compare import Watch
from horizonserve.bench.live import Live, slo_changes
from horizonserve.bench.metrics import Targets
from horizonserve.bench.saturation import Saturation
from horizonserve.bench.solo import Solo
from horizonserve.bench.store import Store
from horizonserve.config import Settings
from horizonserve.slo import Output, RequestClass
from horizonserve.workload import Mix

SLO_MULTIPLE: Final = 5.0
TBT_MULTIPLE: Final = 1.5
NOTE: Final = "calibration"


@dataclass(frozen=True, slots=True)
class Effort:
    """How much time goes into a calibration."""

    short_count: int
    long_count: int
    class_limit_s: float
    ramp_s: float
    window_s: float

    @property
    def guess_s(self) -> float:
        return 2 * self.class_limit_s + self.ramp_s + self.window_s


QUICK: Final = Effort(20, 6, class_limit_s=35.0, ramp_s=15.0, window_s=40.0)
THOROUGH: Final = Effort(60, 12, class_limit_s=110.0, ramp_s=20.0, window_s=90.0)


@dataclass(frozen=True, slots=True)
class Calibration:
    """The scale of an experiment."""

    solos: dict[RequestClass, Solo]
    saturation: Saturation
    slots: int

    @property
    def slo_ms(self) -> dict[RequestClass, float]:
        """Targets: 5 x solo p95."""
        return {name: round(one.slo_ms(SLO_MULTIPLE), 1) for name, one in self.solos.items()}

    @property
    def tbt_ms(self) -> float | None:
        """Target between the tokens of text: 1.5 x solo TPOT p50 of t2t; None without any."""
        text = self.solos.get(RequestClass.T2T)
        if text is None or text.tpot_p50_s is None:
            return None
        return round(TBT_MULTIPLE * text.tpot_p50_s * 1_000, 1)

    @property
    def targets(self) -> Targets:
        """All that is promised."""
        tbt_ms = self.tbt_ms
        return Targets(
            {name: ms / 1_000 for name, ms in self.slo_ms.items()},
            None if tbt_ms is None else tbt_ms / 1_000,
        )

    def drain_s(self, limit_s: float) -> float:
        """How long a run must go on after its last arrival so that every request is decided.

        A shorter one would leave out what a policy has starved, and so reward starving it.
        """
        return min(limit_s, round(max(self.slo_ms.values()) / 1_000 + 1.0, 1))

    def line(self) -> str:
        """For people."""
        alone = ", ".join(
            f"{name.value} {one.first_p50_s:.2f}/{one.first_p95_s:.2f} s"
            for name, one in self.solos.items()
        )
        tbt = f", {self.tbt_ms:g} ms between tokens" if self.tbt_ms else ""
        return (
            f"First response alone, p50/p95: {alone}. Targets: {SLO_MULTIPLE:g}x p95{tbt}."
            f" Saturation of default at {self.slots} slots: {self.saturation.rate_rps:.2f}"
            f" +- {self.saturation.standard_error_rps:.2f} requests/s."
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "solo": {name.value: one.to_json() for name, one in self.solos.items()},
            "saturation": self.saturation.to_json(),
            "slots": self.slots,
        }


def _from_json(plain: dict[str, Any]) -> Calibration:
    solos = {RequestClass(name): Solo.from_json(name, one) for name, one in plain["solo"].items()}
    return Calibration(solos, Saturation.from_json(plain["saturation"]), plain["slots"])


async def calibrate(
    live: Live,
    store: Store,
    mix: Mix,
    watch: Watch,
    *,
    slots: int,
    effort: Effort,
) -> tuple[Calibration, Settings]:
    """Measure, or read what was measured when the experiment began; then set the targets.

    Returns:
        The calibration, and the settings with the targets in them: the base of all arms.
    """
    stock = live.record().settings.changed({"scheduler": "default", "slots": slots})
    if noted := store.noted(NOTE):
        calibration = _from_json(noted)
        watch.skip(effort.guess_s)
    else:
        calibration = await _measure(live, mix, watch, stock, slots, effort)
        store.note(NOTE, calibration.to_json())
    base = stock.changed({**slo_changes(calibration.slo_ms), "tbt_text_ms": calibration.tbt_ms})
    await live.idle()
    await live.switch(base)
    return calibration, base


async def _measure(
    live: Live, mix: Mix, watch: Watch, stock: Settings, slots: int, effort: Effort
) -> Calibration:
    solos: dict[RequestClass, Solo] = {}
    await live.idle()
    await live.switch(stock)
    for name in mix.classes:
        with watch.step(f"{name.value} alone", effort.class_limit_s) as say:
            is_short = name.output is Output.TEXT
            solos[name] = await solo.measure(
                live,
                mix,
                name,
                count=effort.short_count if is_short else effort.long_count,
                limit_s=effort.class_limit_s,
                progress=say,
            )
    with watch.step("saturation rate", effort.ramp_s + effort.window_s) as say:
        rate = await saturation.measure(
            live,
            mix,
            # More than the slots, so that each is taken again at once.
            in_flight=max(16, 2 * slots),
            ramp_s=effort.ramp_s,
            window_s=effort.window_s,
            progress=say,
        )
    return Calibration(solos, rate, slots)
