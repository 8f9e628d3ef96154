"""Streams under HALO (halo.py), as arrays with a row each.

Hundreds of requests get a token in every iteration. To note that one by one, and to read it again
for the next plan, would take longer than the plan. While a request has a row, its release times are
here and not in its ticket.
"""

from __future__ import annotations

from math import nan
from typing import Final

import numpy as np
from numpy.typing import NDArray

_FIRST_ROWS: Final = 64
#: A longer TBT is none.
LONGEST_TBT_S: Final = 1e6

Ints = NDArray[np.int64]


class Streams:
    """Times in seconds on the clock of the tickets.

    Row 0 is that of every request that generates nothing; it has no release time (nan).
    """

    def __init__(self) -> None:
        #: Release time of the last token, R_g; nan: the row is free.
        self.released_s = np.full(1, nan)
        self.tbt_s = np.zeros(1)
        self.context_tokens = np.zeros(1)
        self._free: list[int] = []
        self._grow(_FIRST_ROWS)

    def _grow(self, rows: int) -> None:
        size = len(self.released_s)
        more = np.zeros(rows)
        self.released_s = np.concatenate([self.released_s, more + nan])
        self.tbt_s = np.concatenate([self.tbt_s, more])
        self.context_tokens = np.concatenate([self.context_tokens, more])
        self._free.extend(range(size + rows - 1, size - 1, -1))

    def enter(self, released_s: float, tbt_s: float, context_tokens: int) -> int:
        """The row of one more request."""
        if not self._free:
            self._grow(len(self.released_s))
        row = self._free.pop()
        self.released_s[row], self.tbt_s[row] = released_s, min(tbt_s, LONGEST_TBT_S)
        self.context_tokens[row] = context_tokens
        return row

    def leave(self, row: int) -> float:
        """The request of this row generates no more; its R_g."""
        released_s = float(self.released_s[row])
        self.released_s[row] = nan
        self._free.append(row)
        return released_s

    def generated(self, rows: Ints, tokens: Ints, now_s: float) -> None:
        """So many tokens of the requests of these rows, one or more, were generated now.

        R_k = max(G_k, R_(k-1) + TBT); of tokens that come at once only the first can be late. Any
        number of rows may be 0.
        """
        before_s, tbt_s = self.released_s[rows], self.tbt_s[rows]
        self.released_s[rows] = np.maximum(before_s + tbt_s, now_s) + (tokens - 1) * tbt_s
        self.context_tokens[rows] += tokens
