"""How long a request takes from its first step to its first response.

For a request of class c with x prompt tokens (media included, as the shared stage counts them) and
g answer tokens of the shared stage:

    r(x, g) = k_c (f_c(x) + b_c (g - g_c))     where a profile has the class
    r(x, g) = k_c (w_c . (1, x, g))            elsewhere

- f_c, b_c, g_c: what was measured alone on the machine. f_c is monotone between the sizes that
  were measured (PCHIP) and goes on with its last slope beyond them.
- w_c: learned from answers; before the first, a constant that the settings give.
- k_c: what everything takes now over what it took then. A moving average of log(actual /
  estimated), in which no single answer counts for more than twice or half.

Text does not wait for its answer's length, so there b = 0. Progress is not subtracted from r but
from the request: before its first step there is none, and after it the shared stage knows the
tokens that are left (lending.py).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from itertools import pairwise
from math import exp, isfinite, log
from statistics import fmean
from typing import Any, Final

import numpy as np
from scipy.interpolate import PchipInterpolator
from scipy.optimize import isotonic_regression

from horizonserve.slo import RequestClass

#: Weight of an answer in the correction, and the largest factor that a single one stands for.
_WEIGHT: Final = 0.15
_LARGEST: Final = 2.0
#: Answers of a class without a profile before its correction is separated from its line.
_SETTLED: Final = 10
#: Entries of a curve's table between two sizes.
_TABLE: Final = 16
#: No estimate is shorter.
LEAST_S: Final = 1e-3
#: Of the line's coefficients: what they may be before the first answer, per estimate at the start
#: (and per 1,000 tokens); by how much of that they drift from answer to answer; and how far an
#: answer may be off, as a share of it.
_PRIOR: Final = np.array([10.0, 10.0, 10.0])
_DRIFT: Final = 0.002
_NOISE: Final = 0.2
_THOUSAND: Final = 1e3


class Curve:
    """First responses of a class alone on the machine."""

    def __init__(
        self,
        points: Iterable[tuple[float, float]],
        answer_tokens: float = 0.0,
        per_answer_token_s: float = 0.0,
    ) -> None:
        """A curve through what was measured.

        ``points``: (prompt tokens, seconds), at least one; of equal tokens the mean counts.
        ``answer_tokens``: of the requests that were measured; ``per_answer_token_s``: what each
        further one takes.
        """
        at: dict[float, list[float]] = {}
        for x, seconds in points:
            at.setdefault(x, []).append(seconds)
        tokens = sorted(at)
        first_s = isotonic_regression([fmean(at[x]) for x in tokens]).x
        self._slope_s = 0.0
        if len(tokens) > 1:
            self._slope_s = float(first_s[-1] - first_s[-2]) / (tokens[-1] - tokens[-2])
            # Read for every request that arrives, so it is a table: SciPy's call takes 10 us.
            between = PchipInterpolator(tokens, first_s)
            tokens = [
                *(float(x) for low, high in pairwise(tokens) for x in _steps(low, high)),
                tokens[-1],
            ]
            first_s = between(tokens)
        self._tokens, self._first_s = tokens, [float(y) for y in first_s]
        self._answer_tokens = answer_tokens
        self._per_answer_token_s = per_answer_token_s

    def first_response_s(self, prompt_tokens: float, answer_tokens: float) -> float:
        """Seconds to the first response."""
        xs, ys = self._tokens, self._first_s
        at = bisect_right(xs, prompt_tokens)
        if at == 0:
            first_s = ys[0]
        elif at == len(xs):
            first_s = ys[-1] + self._slope_s * (prompt_tokens - xs[-1])
        else:
            share = (prompt_tokens - xs[at - 1]) / (xs[at] - xs[at - 1])
            first_s = ys[at - 1] + share * (ys[at] - ys[at - 1])
        answer_s = self._per_answer_token_s * (answer_tokens - self._answer_tokens)
        return max(LEAST_S, first_s + answer_s)


def _steps(low: float, high: float) -> Any:
    return np.linspace(low, high, _TABLE, endpoint=False)


class _Line:
    """w . (1, x, g), by recursive least squares with slowly moving coefficients."""

    def __init__(self, start_s: float) -> None:
        self._w = np.array([start_s, 0.0, 0.0])
        self._per_s = start_s, 0.0, 0.0
        self._p = np.diag((_PRIOR * start_s) ** 2)
        self._drift = np.diag((_DRIFT * _PRIOR * start_s) ** 2)

    def first_response_s(self, prompt_tokens: float, answer_tokens: float) -> float:
        first_s, prompt_s, answer_s = self._per_s
        both_s = prompt_tokens * prompt_s + answer_tokens * answer_s
        return max(LEAST_S, first_s + both_s / _THOUSAND)

    def observe(self, prompt_tokens: float, answer_tokens: float, actual_s: float) -> None:
        x = np.array([1.0, prompt_tokens / _THOUSAND, answer_tokens / _THOUSAND])
        self._p += self._drift
        px = self._p @ x
        estimated_s = float(self._w @ x)
        # Longer requests vary by more, and one that took far longer than expected says little.
        variance = float(x @ px) + (_NOISE * max(actual_s, estimated_s)) ** 2
        self._w += px / variance * (actual_s - estimated_s)
        self._p -= np.outer(px, px) / variance
        # More tokens never take less.
        np.maximum(self._w, 0.0, out=self._w)
        first_s, prompt_s, answer_s = map(float, self._w)
        self._per_s = first_s, prompt_s, answer_s


class _Class:
    """The estimate of one class and its correction."""

    def __init__(self, base: Curve | _Line) -> None:
        self.base = base
        self.answers = 0
        self._log_correction = 0.0

    @property
    def correction(self) -> float:
        return exp(self._log_correction)

    def observe(self, prompt_tokens: float, answer_tokens: float, actual_s: float) -> None:
        self.answers += 1
        if isinstance(self.base, _Line):
            self.base.observe(prompt_tokens, answer_tokens, actual_s / self.correction)
            if self.answers < _SETTLED:
                return
        estimated_s = self.correction * self.base.first_response_s(prompt_tokens, answer_tokens)
        error = log(actual_s / estimated_s)
        self._log_correction += _WEIGHT * max(-log(_LARGEST), min(error, log(_LARGEST)))


class Estimator:
    """Estimates per class; learns from every first response."""

    def __init__(
        self,
        start_s: Mapping[RequestClass, float],
        curves: Mapping[RequestClass, Curve] | None = None,
    ) -> None:
        """``start_s``: what a class takes where no curve says it and before its first answer."""
        curves = curves or {}
        self._classes = {
            name: _Class(curves[name] if name in curves else _Line(seconds))
            for name, seconds in start_s.items()
        }

    def start(self, start_s: Mapping[RequestClass, float]) -> None:
        """Start elsewhere with the classes of which nothing is known yet."""
        for name, one in self._classes.items():
            if isinstance(one.base, _Line) and not one.answers:
                one.base = _Line(start_s[name])

    def estimate_s(
        self, request_class: RequestClass, prompt_tokens: float, answer_tokens: float
    ) -> float:
        """Seconds from the first step to the first response; finite and above 0."""
        one = self._classes[request_class]
        return max(
            LEAST_S, one.correction * one.base.first_response_s(prompt_tokens, answer_tokens)
        )

    def observe(
        self,
        request_class: RequestClass,
        prompt_tokens: float,
        answer_tokens: float,
        actual_s: float,
    ) -> None:
        """Learn from a request whose first response came after so long."""
        if actual_s > 0 and isfinite(actual_s):
            self._classes[request_class].observe(prompt_tokens, answer_tokens, actual_s)

    def answers(self, request_class: RequestClass) -> int:
        """How many first responses of the class were learned from."""
        return self._classes[request_class].answers

    def correction(self, request_class: RequestClass) -> float:
        """k: what the class takes now over what it was said to take."""
        return self._classes[request_class].correction
