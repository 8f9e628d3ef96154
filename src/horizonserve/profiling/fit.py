"""From samples to a profile.

Of a class, with its samples in rounds (each size once):

    solo p50, p95       of all samples together, every size alike
    interval of p95     where the p95 of another such sweep falls (bench/intervals.py), over FEWEST
                        blocks of consecutive rounds, so that a drift of the machine is in it
    prompt tokens       of a size: what the text class of the same input counted for it
    b                   first response per answer token: least squares of the medians of its sizes
                        on (1, prompt tokens, answer tokens), no coefficient below 0; 0 for text
    shared              of a size: what the text class of the same input takes to its first token,
                        and its time per token for the rest of the answer
    downstream          median first response - shared, at least 0

The last two say where the time goes; they are not measured in the stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np
from scipy.optimize import nnls

from horizonserve.bench.intervals import Interval, repeated_quantile
from horizonserve.profile import ClassProfile, Size
from horizonserve.profiling.plan import Asked, Cell, text_of
from horizonserve.profiling.samples import Sample
from horizonserve.slo import Output, RequestClass

#: A size with fewer samples has no median worth the name.
FEWEST: Final = 6


def looks(rounds: int) -> Iterator[int]:
    """After how many of these rounds a class could be done: FEWEST, and each doubling of it.

    An interval that is looked at after every round is narrow by chance some time.
    """
    look = FEWEST
    while look <= rounds:
        yield look
        look *= 2


def p95_interval(samples: Sequence[Sample]) -> Interval | None:
    """Where the p95 of the class in another sweep falls, 95%; None without two rounds."""
    rounds = sorted({sample.turn for sample in samples})
    blocks: dict[int, list[float]] = {}
    for sample in samples:
        block = rounds.index(sample.turn) * FEWEST // max(FEWEST, len(rounds))
        blocks.setdefault(block, []).append(sample.first_s)
    return repeated_quantile(list(blocks.values()), 0.95)


def relative_width(samples: Sequence[Sample]) -> float:
    """Half the width of the p95's interval, as a share of the p95; infinite while unknown."""
    interval = p95_interval(samples)
    if interval is None:
        return float("inf")
    return (interval[1] - interval[0]) / 2 / _quantile_s([s.first_s for s in samples], 0.95)


def profiles(
    plan: Sequence[Cell], samples: Sequence[Sample], slo_multiple: float
) -> dict[RequestClass, ClassProfile]:
    """A profile of every class that can have one.

    Each of its sizes needs ``FEWEST`` samples, and so does the same size of the text class of its
    input, whose answers tell how long the prompts are.
    """
    of_class: dict[RequestClass, dict[Cell, list[Sample]]] = {}
    for sample in samples:
        cell = plan[sample.cell]
        of_class.setdefault(cell.request_class, {}).setdefault(cell, []).append(sample)
    whole = {
        name: _Sizes(sizes)
        for name, sizes in of_class.items()
        if all(len(found) >= FEWEST for found in sizes.values())
    }
    return {
        name: _profile(name, whole[name], whole[text_of(name)], slo_multiple)
        for name in RequestClass
        if name in whole
        and text_of(name) in whole
        and whole[name].asked <= whole[text_of(name)].prompt_tokens.keys()
    }


class _Sizes:
    """What was measured of a class."""

    def __init__(self, sizes: Mapping[Cell, Sequence[Sample]]) -> None:
        self.of = sizes
        self.asked = {cell.asked for cell in sizes}
        self.median_s = {
            cell: _quantile_s([s.first_s for s in found], 0.5) for cell, found in sizes.items()
        }
        #: Both of a text class.
        self.first_s = {cell.asked: median_s for cell, median_s in self.median_s.items()}
        self.prompt_tokens = {
            cell.asked: round(float(np.median(counts)))
            for cell, found in sizes.items()
            if (counts := [s.prompt_tokens for s in found if s.prompt_tokens])
        }
        tpots_s = [s.tpot_s for found in sizes.values() for s in found if s.tpot_s is not None]
        self.tpot_s = _quantile_s(tpots_s, 0.5) if tpots_s else None

    def shared_s(self, asked: Asked, answer_tokens: int) -> float:
        """Of a text class: until the last token of an answer."""
        return self.first_s[asked] + (self.tpot_s or 0.0) * max(0, answer_tokens - 1)


def _profile(
    request_class: RequestClass, sizes: _Sizes, texts: _Sizes, slo_multiple: float
) -> ClassProfile:
    every = [sample for found in sizes.of.values() for sample in found]
    firsts_s = [sample.first_s for sample in every]
    p95_s = _quantile_s(firsts_s, 0.95)
    low_s, high_s = p95_interval(every) or (p95_s, p95_s)
    text = request_class.output is Output.TEXT
    return ClassProfile(
        samples=len(every),
        solo_p50_ms=_ms(_quantile_s(firsts_s, 0.5)),
        solo_p95_ms=_ms(p95_s),
        solo_p95_low_ms=_ms(low_s),
        solo_p95_high_ms=_ms(high_s),
        slo_ms=_ms(slo_multiple * p95_s),
        tpot_p50_ms=_ms(sizes.tpot_s) if text and sizes.tpot_s else None,
        per_answer_token_ms=0.0 if text else _ms(_per_answer_token_s(sizes, texts)),
        sizes=tuple(_size(cell, sizes, texts) for cell in sizes.of),
    )


def _size(cell: Cell, sizes: _Sizes, texts: _Sizes) -> Size:
    median_s = sizes.median_s[cell]
    shared_s = median_s
    if cell.request_class.output is not Output.TEXT:
        shared_s = min(median_s, texts.shared_s(cell.asked, cell.answer_tokens))
    found = sizes.of[cell]
    return Size(
        prompt_words=cell.prompt_words,
        audio_s=cell.audio_ms / 1e3,
        image_px=cell.image_px,
        video_frames=cell.video_frames,
        prompt_tokens=texts.prompt_tokens[cell.asked],
        answer_tokens=cell.answer_tokens,
        samples=len(found),
        first_p50_ms=_ms(median_s),
        first_p95_ms=_ms(_quantile_s([s.first_s for s in found], 0.95)),
        shared_ms=_ms(shared_s),
        downstream_ms=_ms(median_s - shared_s),
    )


def _per_answer_token_s(sizes: _Sizes, texts: _Sizes) -> float:
    if len({cell.answer_tokens for cell in sizes.of}) < 2:
        return 0.0
    rows = [(1.0, texts.prompt_tokens[cell.asked], cell.answer_tokens) for cell in sizes.of]
    coefficients, _ = nnls(np.array(rows), np.array(list(sizes.median_s.values())))
    return float(coefficients[2])


def _quantile_s(values: Sequence[float], q: float) -> float:
    return float(np.quantile(values, q))


def _ms(value_s: float) -> float:
    return value_s * 1e3
