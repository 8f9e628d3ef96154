"""The plots of a fixed-cap sweep: HorizonServe's Figure 4 on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from horizonserve.profile import SmProfile
from horizonserve.profiling.sm import Short

#: Colours that the colour-blind tell apart (Okabe and Ito).
_ALONE: Final = "#0072B2"
_CO_RUN: Final = "#D55E00"


def plot(sms: SmProfile, shorts: Sequence[Short], kind: str, out: Path) -> None:
    """Write both panels as a PNG.

    (a) Short requests over time with the whole device: first token, and memory pressure.
    (b) TPOT of decode alone, and first token of short requests beside downstream work, per level.

    Args:
        sms: the sweep; levels without a measurement are left out of (b).
        shorts: those of one level, in the order in which they were sent.
        kind: how the figures are marked, such as *measured on CPU engine*.
        out: where it goes.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (over_time, per_level) = pyplot.subplots(1, 2, figsize=(11, 4))
    _over_time(over_time, shorts)
    _per_level(per_level, sms)
    figure.suptitle(f"Shared stage under fixed SM caps ({kind})")
    figure.tight_layout()
    figure.savefig(out, dpi=120)
    pyplot.close(figure)


def _over_time(axes: Any, shorts: Sequence[Short]) -> None:
    for co_run, colour, label in ((False, _ALONE, "alone"), (True, _CO_RUN, "downstream active")):
        some = [short for short in shorts if short.co_run is co_run]
        ms = [1e3 * short.ttft_s for short in some]
        axes.scatter([short.at_s for short in some], ms, s=12, color=colour, label=label)
    axes.set_xlabel("time (s)")
    axes.set_ylabel("TTFT of short requests (ms)")
    axes.set_ylim(bottom=0)
    known = [short for short in shorts if short.pressure is not None]
    if known:
        pressure = axes.twinx()
        pressure.plot(
            [s.at_s for s in known], [s.pressure for s in known], color="0.6", linewidth=1
        )
        pressure.set_ylim(0, 1)
        pressure.set_ylabel("memory pressure")
    axes.legend(loc="upper left")
    axes.set_title("(a) the whole device, over time")


def _per_level(axes: Any, sms: SmProfile) -> None:
    levels = [level for level in sms.levels if level.tpot_p50_ms and level.corun_ttft_p50_ms]
    counts = [level.shared_sms for level in levels]
    axes.plot(
        counts, [level.tpot_p50_ms for level in levels], "o--", color=_ALONE, label="TPOT alone"
    )
    axes.set_xlabel("SMs of the shared stage")
    axes.set_ylabel("TPOT (ms)")
    axes.set_xticks(counts)
    right = axes.twinx()
    right.plot(
        counts,
        [level.corun_ttft_p50_ms for level in levels],
        "o-",
        color=_CO_RUN,
        label="TTFT co-running",
    )
    right.set_ylabel("TTFT (ms)")
    for each in (axes, right):
        each.set_ylim(0, 1.2 * each.get_ylim()[1])
    if sms.s_cap_sms is not None:
        axes.axvline(sms.s_cap_sms, color="0.5", linewidth=1)
        axes.annotate("S_cap", (sms.s_cap_sms, 0), xytext=(3, 5), textcoords="offset points")
    handles = [*axes.get_lines()[:1], *right.get_lines()]
    axes.legend(handles=handles, loc="lower left")
    axes.set_title("(b) per level")
