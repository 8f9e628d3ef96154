"""A server of known times, for the sweep that asks it."""

from __future__ import annotations

import random
from collections.abc import Callable

from horizonserve.bench.result import Result, Status
from horizonserve.profiling.plan import Cell
from horizonserve.slo import Output, RequestClass

TOKEN_S = 0.035


def first_s(cell: Cell) -> float:
    """What the machine takes for a request of this size."""
    text_s = 0.05 + 0.7e-3 * prompt_tokens(cell)
    if cell.request_class.output is Output.TEXT:
        return text_s
    return text_s + TOKEN_S * (cell.answer_tokens - 1) + 0.6 + 0.02 * cell.answer_tokens


def prompt_tokens(cell: Cell) -> int:
    media = cell.audio_ms // 40 + cell.image_px**2 // 784 * max(1, cell.video_frames)
    return cell.prompt_words + 7 + media


class Machine:
    """Answers at once, with the time that it would have taken."""

    def __init__(self, noise: float = 0.05, seed: int = 0) -> None:
        self.asked: list[Cell] = []
        self.chance = random.Random(seed)
        self.noise = noise
        #: What goes wrong with a request; None: nothing.
        self.error: Callable[[Cell], str | None] = lambda _cell: None

    async def __call__(self, cell: Cell, seed: int) -> Result:
        self.asked.append(cell)
        error = self.error(cell)
        text = cell.request_class.output is Output.TEXT
        took_s = first_s(cell) * self.chance.lognormvariate(0, self.noise)
        return Result(
            index=0,
            request_class=cell.request_class,
            at_s=0.0,
            status=Status.FAILED if error else Status.OK,
            first_s=None if error else took_s,
            end_s=took_s,
            # As a server does: with audio come no counts.
            tokens=cell.answer_tokens if text else 0,
            prompt_tokens=prompt_tokens(cell) if text else 0,
            tpot_s=TOKEN_S if text else None,
            error=error or "",
        )


CLASSES = (RequestClass.T2T, RequestClass.A2T, RequestClass.T2A)
