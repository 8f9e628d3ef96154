"""From samples to a profile.

Of a class, with its samples in rounds (each size once):

    solo p50, p95       of all samples together, every size alike
    interval of p95     bootstrap over rounds, so that a drift of the machine is in it
    b                   first response per answer token: least squares of the medians of its sizes
                        on (1, prompt tokens, answer tokens), no coefficient below 0; 0 for text
    shared              of a size: what the text class of the same input takes to its first token
                        at as many prompt tokens, and its time per token for the rest of the answer
    downstream          median first response - shared, at least 0

The last two say where the time goes; they are not measured in the stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from scipy.optimize import nnls

from horizonserve.bench.intervals import Interval, block_quantile
from horizonserve.policy.estimate import Curve
from horizonserve.profile import ClassProfile, Size
from horizonserve.profiling.plan import Cell
from horizonserve.profiling.samples import Sample
from horizonserve.slo import Output, RequestClass

#: A size with fewer samples has no median worth the name.
FEWEST: Final = 3


def p95_interval(samples: Sequence[Sample]) -> Interval | None:
    """95% interval of the p95 of a class; None without two rounds."""
    rounds: dict[int, list[float]] = {}
    for sample in samples:
        rounds.setdefault(sample.turn, []).append(sample.first_s)
    return block_quantile([list(rounds.values())], 0.95) if len(rounds) > 1 else None


def relative_width(samples: Sequence[Sample]) -> float:
    """Half the width of the p95's interval, as a share of the p95; infinite while unknown."""
    interval = p95_interval(samples)
    if interval is None:
        return float("inf")
    return (interval[1] - interval[0]) / 2 / _quantile_s([s.first_s for s in samples], 0.95)


def profiles(
    plan: Sequence[Cell], samples: Sequence[Sample], slo_multiple: float
) -> dict[RequestClass, ClassProfile]:
    """A profile of every class of which each measured size has at least ``FEWEST`` samples."""
    of_class: dict[RequestClass, dict[int, list[Sample]]] = {}
    for sample in samples:
        sizes = of_class.setdefault(plan[sample.cell].request_class, {})
        sizes.setdefault(sample.cell, []).append(sample)
    whole = {
        name: sizes
        for name, sizes in of_class.items()
        if all(len(found) >= FEWEST for found in sizes.values())
    }
    texts = {
        name.value[0]: _Shared(sizes) for name, sizes in whole.items() if name.output is Output.TEXT
    }
    return {
        name: _profile(plan, name, sizes, texts.get(name.value[0]), slo_multiple)
        for name, sizes in sorted(whole.items(), key=lambda one: list(RequestClass).index(one[0]))
    }


class _Shared:
    """What the shared stage takes for one kind of input."""

    def __init__(self, sizes: Mapping[int, Sequence[Sample]]) -> None:
        self.first = Curve(
            (found[0].prompt_tokens, _quantile_s([s.first_s for s in found], 0.5))
            for found in sizes.values()
        )
        tpots_s = [s.tpot_s for found in sizes.values() for s in found if s.tpot_s is not None]
        self.tpot_s = _quantile_s(tpots_s, 0.5) if tpots_s else None

    def time_s(self, prompt_tokens: int, answer_tokens: int) -> float:
        """Until the last token of an answer."""
        rest_s = (self.tpot_s or 0.0) * max(0, answer_tokens - 1)
        return self.first.first_response_s(prompt_tokens, 0) + rest_s


def _profile(
    plan: Sequence[Cell],
    request_class: RequestClass,
    sizes: Mapping[int, Sequence[Sample]],
    shared: _Shared | None,
    slo_multiple: float,
) -> ClassProfile:
    every = [sample for found in sizes.values() for sample in found]
    firsts_s = [sample.first_s for sample in every]
    p95_s = _quantile_s(firsts_s, 0.95)
    low_s, high_s = p95_interval(every) or (p95_s, p95_s)
    text = request_class.output is Output.TEXT
    tpot_s = shared.tpot_s if text and shared else None
    return ClassProfile(
        samples=len(every),
        solo_p50_ms=_ms(_quantile_s(firsts_s, 0.5)),
        solo_p95_ms=_ms(p95_s),
        solo_p95_low_ms=_ms(min(low_s, p95_s)),
        solo_p95_high_ms=_ms(max(high_s, p95_s)),
        slo_ms=_ms(slo_multiple * p95_s),
        tpot_p50_ms=None if tpot_s is None else _ms(tpot_s),
        per_answer_token_ms=0.0 if text else _ms(_per_answer_token_s(list(sizes.values()))),
        sizes=tuple(
            _size(plan[cell], found, None if text else shared, text)
            for cell, found in sorted(sizes.items())
        ),
    )


def _size(cell: Cell, found: Sequence[Sample], shared: _Shared | None, text: bool) -> Size:
    firsts_s = [sample.first_s for sample in found]
    median_s = _quantile_s(firsts_s, 0.5)
    prompt_tokens = round(_median([s.prompt_tokens for s in found]))
    answer_tokens = round(_median([s.answer_tokens for s in found]))
    shared_s: float | None = None
    if text:
        shared_s = median_s
    elif shared is not None:
        shared_s = min(median_s, shared.time_s(prompt_tokens, answer_tokens))
    return Size(
        prompt_words=cell.prompt_words,
        audio_s=cell.audio_ms / 1e3,
        image_px=cell.image_px,
        video_frames=cell.video_frames,
        prompt_tokens=prompt_tokens,
        answer_tokens=answer_tokens,
        samples=len(found),
        first_p50_ms=_ms(median_s),
        first_p95_ms=_ms(_quantile_s(firsts_s, 0.95)),
        shared_ms=None if shared_s is None else _ms(shared_s),
        downstream_ms=None if shared_s is None else _ms(median_s - shared_s),
    )


def _per_answer_token_s(sizes: Sequence[Sequence[Sample]]) -> float:
    rows = [(1.0, found[0].prompt_tokens, found[0].answer_tokens) for found in sizes]
    medians_s = [_quantile_s([s.first_s for s in found], 0.5) for found in sizes]
    if len({answer for _, _, answer in rows}) < 2:
        return 0.0
    coefficients, _ = nnls(np.array(rows), np.array(medians_s))
    return float(coefficients[2])


def _quantile_s(values: Sequence[float], q: float) -> float:
    return float(np.quantile(values, q))


def _median(values: Sequence[float]) -> float:
    return float(np.median(values))


def _ms(value_s: float) -> float:
    return value_s * 1e3
