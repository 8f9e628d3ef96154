"""Seeded traffic of a server with several services (HALO 6.1).

Each request belongs to a service drawn with equal probability; its lengths are lognormal, cut to
1/64 and 8 times their median. Arrivals are Poisson, or gamma with a coefficient of variation of 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

#: Of bursty arrivals: shape 1 / CV^2.
BURST_SHAPE: Final = 0.25
_LEAST, _MOST = 1 / 64, 8.0


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths of a service's requests: medians, and standard deviations of their logarithms."""

    prompt_tokens: int
    answer_tokens: int
    prompt_sigma: float = 0.7
    answer_sigma: float = 0.6


@dataclass(frozen=True, slots=True)
class Call:
    """A request."""

    at_s: float
    service: str
    prompt_tokens: int
    answer_tokens: int


#: Stand-ins for the datasets of HALO's Table 1, whose lengths it does not give: assumptions.
HOSPITAL: Final = {
    "intelligent-triage": Shape(400, 245, prompt_sigma=0.8),
    "pre-assessment": Shape(330, 220),
    "analysis-assistant": Shape(445, 270),
    "record-generation": Shape(600, 270),
}


def make_calls(
    shapes: Mapping[str, Shape],
    rate_rps: float,
    duration_s: float,
    seed: int,
    burst: bool = False,
    scale: float = 1.0,
) -> list[Call]:
    """Requests in order of arrival; lengths ``scale`` times those of the shapes.

    Raises:
        ValueError: rate, duration or scale is no number above 0, or there is no service.
    """
    for name, value in (("rate_rps", rate_rps), ("duration_s", duration_s), ("scale", scale)):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name}={value!r}: give a finite number above 0")
    if not shapes:
        raise ValueError("shapes={}: give at least one service")
    random = np.random.default_rng(seed)
    names = list(shapes)
    calls: list[Call] = []
    at_s = 0.0
    while True:
        gap = random.gamma(BURST_SHAPE, 1 / BURST_SHAPE) if burst else random.exponential()
        at_s += float(gap) / rate_rps
        if at_s >= duration_s:
            return calls
        name = names[int(random.integers(len(names)))]
        shape = shapes[name]

        def length(median: float, sigma: float) -> int:
            factor = min(_MOST, max(_LEAST, float(random.lognormal(0.0, sigma))))
            return max(1, round(scale * median * factor))

        prompt = length(shape.prompt_tokens, shape.prompt_sigma)
        calls.append(Call(at_s, name, prompt, length(shape.answer_tokens, shape.answer_sigma)))
