"""How long a step takes, learned from the steps themselves.

    T(x) = w . x,   x = (1, decodes, prefill tokens, attention, co-run)

- *decodes*: requests that advance by one token; *prefill tokens*: all other tokens;
- *attention*: tokens x the context that each reads, in millions;
- *co-run*: 1 while a stage downstream works on the same device, else 0.

w follows a random walk and every step measures it once: a Kalman filter. It learns from the first
step on, keeps what a constant load does not excite, and follows a machine that becomes slower
within tens of steps. A single step that has nothing to do with the model (a pause of the machine)
is cut to three standard deviations.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

#: What a coefficient may be before anything was measured, in seconds per unit.
_PRIOR_S: Final = np.array([5e-2, 5e-3, 5e-4, 5e-2, 1e-2])
#: A coefficient changes by this share of itself in a step.
_DRIFT: Final = 0.02
_LEAST_S: Final = 0.01 * _PRIOR_S
#: Standard deviation of a measured step, as a share of it.
_NOISE: Final = 0.1
_OUTLIER: Final = 3.0
_MILLION: Final = 1e6
#: Context of a decode that is alone on the server.
_SOLO_CONTEXT_TOKENS: Final = 256


class Load(NamedTuple):
    """What a step computes."""

    decodes: int = 0
    prefill_tokens: int = 0
    #: Sum over all tokens of the context that each reads, in tokens.
    attention: float = 0.0
    #: Whether a stage downstream works at the same time.
    co_run: bool = False


class StepModel:
    """Predicts a step's duration; times in seconds."""

    def __init__(self) -> None:
        self._w = np.zeros(5)
        self._p = np.diag(_PRIOR_S**2)
        self._variances = self._p.reshape(-1)[:: len(self._w) + 1]  # a view of its diagonal
        #: Whether what is predicted co-runs with a stage downstream.
        self.co_run = False
        self._read()

    def _read(self) -> None:
        fixed_s, self._decode_s, self._token_s, attention_s, co_run_s = self._w.tolist()
        self._fixed_s = fixed_s, fixed_s + co_run_s
        self._attention_s = attention_s / _MILLION

    @property
    def fixed_s(self) -> float:
        """What a step takes whatever it holds."""
        return self._fixed_s[self.co_run]

    @property
    def solo_s(self) -> float:
        """Predicted step of one decode alone, that is its TPOT."""
        return self.fixed_s + self.decode_s(_SOLO_CONTEXT_TOKENS)

    def decode_s(self, context_tokens: float) -> float:
        """What one more decode adds to a step."""
        return self._decode_s + self._attention_s * context_tokens

    def prefill_s(self, tokens: float, context_tokens: float) -> float:
        """What a chunk of a prompt, behind so much context, adds to a step."""
        return tokens * (self._token_s + self._attention_s * (context_tokens + tokens / 2))

    def step_s(self, load: Load) -> float:
        """Predicted duration."""
        return (
            self._fixed_s[load.co_run]
            + load.decodes * self._decode_s
            + load.prefill_tokens * self._token_s
            + load.attention * self._attention_s
        )

    def observe(self, load: Load, took_s: float) -> None:
        """Learn from a step that took so long."""
        attention = load.attention / _MILLION
        x = np.array([1.0, load.decodes, load.prefill_tokens, attention, load.co_run])
        # A coefficient of 0 may grow again.
        self._variances += (_DRIFT * np.maximum(self._w, _LEAST_S)) ** 2
        px = self._p @ x
        predicted_s = float(self._w @ x)
        # A step that was short by chance must not count for more than one that was long.
        variance = float(x @ px) + (_NOISE * max(took_s, predicted_s)) ** 2
        reach_s = _OUTLIER * variance**0.5
        error_s = max(-reach_s, min(took_s - predicted_s, reach_s))
        self._w += px / variance * error_s
        self._p -= px[:, None] * px / variance
        np.maximum(self._w, 0.0, out=self._w)
        self._read()
