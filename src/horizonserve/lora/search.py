"""Which SMs the base layer and its LoRA layer get when they run side by side (HALO 4.2).

For a layer and a batch size, with the time of each alone under k SMs, t_base(k) and t_lora(k):

1. both curves, for every k that the device can be split at;
2. base: the fewest SMs at which it is within ``drop`` of its best;
3. LoRA: the fewest of the others at which it takes no longer than the base, give or take ``CLOSE``;
4. LoRA up while the whole decode step gets shorter, else down;
5. base likewise.

Only 4 and 5 need the two together: each try is one measurement of a decode step. Blocks come in
waves, so the time is flat between the counts where a wave falls away, and a walk by single steps
would stop on the first flat stretch. So the walk goes over those counts only, and past one failure.
Both starts of ``DROPS`` are tried and the better end is taken; none where it is no shorter than one
after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

#: Within this share of its best: one close to the paper's 10%, and one that leaves LoRA more.
DROPS: Final = (0.05, 0.40)
CLOSE: Final = 0.05
#: A walk ends after so many tries in a row that were no better.
PATIENCE: Final = 2
#: A smaller gain of a curve is no edge.
_EDGE: Final = 1e-3

Curve = Mapping[int, float]
#: Whole decode step with so many SMs for the base layer and for the LoRA layer, in seconds.
Measure = Callable[[int, int], float]


class Partition(NamedTuple):
    """SMs of a layer pair, and its decode step in seconds."""

    base_sms: int
    lora_sms: int
    step_s: float


def search(
    base_s: Curve, lora_s: Curve, measure: Measure, sequential_s: float, total_sms: int
) -> Partition | None:
    """The best partition that was found; None if one after the other is as good.

    Args:
        base_s: seconds of the base layer alone, by SMs; every count that a group may have.
        lora_s: of the LoRA layer, by the same counts.
        measure: called once for each pair that is tried.
        sequential_s: decode step with both layers one after the other on all SMs.
        total_sms: of the device.

    Raises:
        ValueError: no two counts fit on the device together.
    """
    counts = sorted(base_s)
    if sorted(lora_s) != counts or not counts or 2 * counts[0] > total_sms:
        raise ValueError(
            f"base {counts}, LoRA {sorted(lora_s)} of {total_sms} SMs: give both curves at the same"
            " counts, of which the smallest fits twice"
        )
    known: dict[tuple[int, int], float] = {}

    def step_s(base_sms: int, lora_sms: int) -> float:
        pair = base_sms, lora_sms
        if pair not in known:
            known[pair] = measure(*pair)
        return known[pair]

    found = []
    for drop in DROPS:
        base_sms, lora_sms = _start(base_s, lora_s, drop, total_sms)
        room = [k for k in _edges(lora_s) if k <= total_sms - base_sms]
        lora_sms = _walk(lora_sms, room, lambda k, b=base_sms: step_s(b, k))  # type: ignore[misc]
        room = [k for k in _edges(base_s) if k <= total_sms - lora_sms]
        base_sms = _walk(base_sms, room, lambda k, n=lora_sms: step_s(k, n))  # type: ignore[misc]
        found.append(Partition(base_sms, lora_sms, step_s(base_sms, lora_sms)))
    best = min(found, key=lambda partition: partition.step_s)
    return best if best.step_s < sequential_s else None


def _start(base_s: Curve, lora_s: Curve, drop: float, total_sms: int) -> tuple[int, int]:
    """Stages 2 and 3."""
    counts = sorted(base_s)
    near_s = (1 + drop) * min(base_s.values())
    # The LoRA layer needs some in any case.
    within = [k for k in counts if k <= total_sms - counts[0]]
    base_sms = next((k for k in within if base_s[k] <= near_s), within[-1])
    room = [k for k in counts if k <= total_sms - base_sms]
    enough_s = (1 + CLOSE) * base_s[base_sms]
    return base_sms, next((k for k in room if lora_s[k] <= enough_s), room[-1])


def _edges(curve: Curve) -> list[int]:
    """The counts at which it gets shorter."""
    counts = sorted(curve)
    edges = [counts[0]]
    for count in counts[1:]:
        if curve[count] < (1 - _EDGE) * curve[edges[-1]]:
            edges.append(count)
    return edges


def _walk(start: int, candidates: Sequence[int], step_s: Callable[[int], float]) -> int:
    """The best count of a walk up; where that never got shorter, of a walk down."""
    best, best_s = start, step_s(start)
    above = [k for k in candidates if k > start]
    below = [k for k in reversed(candidates) if k < start]
    for way in (above, below):
        failures = 0
        for count in way:
            tried_s = step_s(count)
            if tried_s < best_s:
                best, best_s, failures = count, tried_s, 0
            else:
                failures += 1
                if failures == PATIENCE:
                    break
        if best != start:
            break
    return best
