"""From figures to verdicts: pure functions, one per claim.

Every function takes the figures of one part: those of both sides as ``(shared, downstream)`` where
two processes run, as ``(figures,)`` where one does. They are what JSON can hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

Figures = dict[str, Any]
Sides = Sequence[Figures]


class Verdict(StrEnum):
    HOLDS = "holds"
    FAILS = "does not hold"
    UNTESTED = "not tested"


@dataclass(frozen=True, slots=True)
class Finding:
    verdict: Verdict
    #: The figures that decide, or why nothing does.
    why: str


Judge = Callable[[Sides], Finding]

#: Two processes take turns when the same work takes this much longer beside the other.
TURNS_RATIO: Final = 1.6
#: ... and run side by side below this.
BESIDE_RATIO: Final = 1.25
#: The paper's "about 5 us", rounded as it would be.
PAPER_ACTIVATION_US: Final = 5.5
OWN_ACTIVATION_US: Final = 5.0
#: With room for a driver that is not on the dot.
LONGEST_PERIOD_S: Final = 1.05
#: A tenth of the time between two samples at 10 Hz.
LATENCY_US: Final = 10_000.0
#: A launch loop that varies more by itself shows nothing.
NOISE: Final = 0.1
LAUNCH_DROP: Final = 0.02
LOAD_RISE: Final = 0.3
TPOT_RATIO: Final = 1.10
TTFT_RATIO: Final = 0.95
SAME_TIME: Final = 0.15
#: Without this much between two levels their times cannot tell which one was used.
LEVELS_APART: Final = 1.5


def _finding(holds: bool, why: str) -> Finding:
    return Finding(Verdict.HOLDS if holds else Verdict.FAILS, why)


def levels_exist(sides: Sides) -> Finding:
    shared = sides[0]
    said = []
    for way, levels in shared["ways"].items():
        sizes = [level[0] for level in levels]
        bounds = f" from {min(sizes)} to {max(sizes)} SMs" if sizes else ""
        said.append(f"by {way}: {len(sizes)}{bounds}")
    rungs = [f"{level[0]}+{level[1]}" for level in shared["ladder"]]
    why = f"{'; '.join(said)} of {shared['die']['total_sms']}; ladder {', '.join(rungs)}"
    return _finding(len(rungs) > 1, why)


def levels_agree(sides: Sides) -> Finding:
    shared, downstream = (side["ways"] for side in sides)
    differ = [
        f"{mine[0]}+{mine[1]} by {way}"
        for way in shared
        for mine, theirs in zip(shared[way], downstream[way], strict=False)
        if mine != theirs
    ]
    count = sum(len(levels) for levels in shared.values())
    if count == 0:
        return Finding(Verdict.UNTESTED, "there is no level")
    same_count = all(len(shared[way]) == len(downstream[way]) for way in shared)
    if differ or not same_count:
        return _finding(False, f"differ: {', '.join(differ) or 'how many there are'}")
    return _finding(True, f"{count} fingerprints equal")


def _overlaps(sides: Sides) -> list[str]:
    said = []
    for mine, theirs in zip(*(side["levels"] for side in sides), strict=True):
        both = sorted(set(mine["sms"]) & set(theirs["sms"]))
        if both:
            said.append(f"{mine['granted_sms']}+{theirs['granted_sms']} share SM {both}")
    return said


def _counts(sides: Sides) -> str:
    """SMs seen of those granted, both sides of every level."""
    return ", ".join(
        " + ".join(f"{len(side['sms'])} of {side['granted_sms']}" for side in pair)
        for pair in zip(*(side["levels"] for side in sides), strict=True)
    )


def smid_disjoint(sides: Sides) -> Finding:
    overlaps = _overlaps(sides)
    return _finding(not overlaps, "; ".join(overlaps) or f"SMs seen: {_counts(sides)}")


def smid_granted(sides: Sides) -> Finding:
    within = all(
        0 < len(level["sms"]) <= level["granted_sms"] for side in sides for level in side["levels"]
    )
    return _finding(within, f"SMs seen: {_counts(sides)}")


def percentage_changes(sides: Sides) -> Finding:
    """Of (shared, downstream) without a percentage, then with it."""
    without, given = sides[:2], sides[2:]
    same = all(
        [len(level["sms"]) for level in plain["levels"]]
        == [len(level["sms"]) for level in limited["levels"]]
        for plain, limited in zip(without, given, strict=True)
    )
    return _finding(not same, f"SMs seen without: {_counts(without)}; with: {_counts(given)}")


def _slowdown(sides: Sides) -> tuple[float, str]:
    ratios = [side["together_s"] / side["alone_s"] for side in sides]
    alone = ", ".join(f"{side['alone_s']:.2f} s alone" for side in sides)
    return max(ratios), f"{' and '.join(f'{ratio:.2f}' for ratio in ratios)} x as long ({alone})"


def take_turns(sides: Sides) -> Finding:
    ratio, why = _slowdown(sides)
    return _finding(ratio >= TURNS_RATIO, why)


def side_by_side(sides: Sides) -> Finding:
    ratio, why = _slowdown(sides)
    return _finding(ratio <= BESIDE_RATIO, why)


def _activation(sides: Sides, most_us: float) -> Finding:
    (figures,) = sides
    took = figures["activation_us"]
    contexts = figures["contexts"]
    made = (
        f"contexts: {min(c['ms'] for c in contexts):.2f} to {max(c['ms'] for c in contexts):.2f} ms"
        f" and {min(c['mib'] for c in contexts):.1f} to {max(c['mib'] for c in contexts):.1f} MiB"
    )
    middle = f"{took['p50']:.2f} us, the middle half {took['p25']:.2f} to {took['p75']:.2f}"
    return _finding(took["p50"] <= most_us, f"{middle}; {made}")


def activation_own(sides: Sides) -> Finding:
    return _activation(sides, OWN_ACTIVATION_US)


def activation_paper(sides: Sides) -> Finding:
    return _activation(sides, PAPER_ACTIVATION_US)


def nvml_latency(sides: Sides) -> Finding:
    took = sides[0]["latency_us"]
    why = f"{took['p50']:.1f} us, p99 {took['p99']:.1f}, at most {took['max']:.1f}"
    return _finding(took["p99"] <= LATENCY_US, why)


def nvml_period(sides: Sides) -> Finding:
    (figures,) = sides
    if figures["timed_samples"] < 3:
        why = f"{figures['timed_samples']} samples with a time: the driver keeps no buffer of them"
        return Finding(Verdict.UNTESTED, why)
    gap = figures["period_s"]
    why = f"{gap['p50']:.3f} s, {gap['min']:.3f} to {gap['max']:.3f}"
    return _finding(gap["p50"] <= LONGEST_PERIOD_S, why)


def _rises(idle: float | str, load: float | str, rest: str) -> Finding:
    if isinstance(idle, str) or isinstance(load, str):
        return Finding(Verdict.UNTESTED, next(str(x) for x in (idle, load) if isinstance(x, str)))
    return _finding(load - idle >= LOAD_RISE, f"{idle:.2f} idle, {load:.2f} under load; {rest}")


def load_seen_by_utilisation(sides: Sides) -> Finding:
    (figures,) = sides
    rest = f"{figures['copied_gb_s']:.0f} GB/s moved"
    return _rises(figures["utilisation"]["idle"], figures["utilisation"]["load"], rest)


def load_seen_by_dram(sides: Sides) -> Finding:
    (figures,) = sides
    rest = f"{figures['copied_gb_s']:.0f} GB/s moved"
    return _rises(figures["dram"]["idle"], figures["dram"]["load"], rest)


def launches_undisturbed(sides: Sides) -> Finding:
    (figures,) = sides
    without, beside = figures["without_per_s"], figures["with_per_s"]
    noise = (without["p75"] - without["p25"]) / without["p50"]
    drop = 1 - beside["p50"] / without["p50"]
    why = (
        f"{without['p50']:.0f} launches a second without, {100 * drop:+.1f}% fewer with"
        f" {figures['looks']} samples; the middle half without varies by {100 * noise:.1f}%"
    )
    if figures["looks"] == 0 or noise > NOISE:
        return Finding(Verdict.UNTESTED, f"the loop shows nothing: {why}")
    return _finding(drop <= LAUNCH_DROP, why)


def capped_beats(sides: Sides, reference: str | None) -> Finding:
    """Whether some rung has a lower TTFT than the reference at a TPOT within 10% of it.

    ``reference`` names a configuration; None means the rung with the most SMs.
    """
    shared, downstream = (side["configurations"] for side in sides)
    rungs = {name: shared[name] for name in shared if name not in ("alone", "uncapped")}
    if reference is None and rungs:
        reference = max(rungs, key=lambda name: int(rungs[name]["granted_sms"]))
        del rungs[reference]
    if reference is None or not rungs:
        return Finding(Verdict.UNTESTED, "there is no rung to compare")
    base = shared[reference]
    said = []
    better = False
    for name, found in {reference: base, **rungs}.items():
        tpot = found["tpot_ms"]["p50"] / base["tpot_ms"]["p50"]
        ttft = found["ttft_ms"]["p50"] / base["ttft_ms"]["p50"]
        good = name != reference and ttft <= TTFT_RATIO and tpot <= TPOT_RATIO
        better = better or good
        said.append(
            f"{name}: TTFT {found['ttft_ms']['p50']:.2f} ms, TPOT {found['tpot_ms']['p50']:.2f} ms"
            f" ({found['decode_gb_s']:.0f} GB/s), downstream"
            f" {downstream[name]['blocks_per_s']:.0f}/s{' (better)' if good else ''}"
        )
    return _finding(better, "; ".join(said))


def capped_beats_uncapped(sides: Sides) -> Finding:
    return capped_beats(sides, "uncapped")


def capped_beats_fullest(sides: Sides) -> Finding:
    return capped_beats(sides, None)


def _apart(figures: Figures) -> Finding | None:
    eager = figures["eager_ms"]
    ratio = eager["low"] / eager["high"]
    if ratio < LEVELS_APART:
        sms = figures["sms"]
        return Finding(
            Verdict.UNTESTED,
            f"{sms['low']} SMs take only {ratio:.2f} x as long as {sms['high']}: no telling them"
            " apart",
        )
    return None


def _close(one: float, other: float) -> bool:
    return abs(one / other - 1) <= SAME_TIME


def graph_keeps_its_level(sides: Sides) -> Finding:
    (figures,) = sides
    replay = figures["replay_ms"]
    kept = all(
        _close(replay[f"{of} on {on}"], replay[f"{of} on {of}"])
        for of, on in (("low", "high"), ("high", "low"))
    )
    return _apart(figures) or _finding(kept, _times(figures))


def graph_per_level_follows(sides: Sides) -> Finding:
    (figures,) = sides
    follows = all(
        _close(figures["replay_ms"][f"{level} on {level}"], figures["eager_ms"][level])
        for level in ("low", "high")
    )
    return _apart(figures) or _finding(follows, _times(figures))


def _times(figures: Figures) -> str:
    sms = figures["sms"]
    eager = ", ".join(f"{sms[level]} SMs {ms:.3f}" for level, ms in figures["eager_ms"].items())
    replay = ", ".join(
        f"graph of {sms[key.split()[0]]} on {sms[key.split()[-1]]} {ms:.3f}"
        for key, ms in figures["replay_ms"].items()
    )
    return f"ms: eager {eager}; {replay}"
