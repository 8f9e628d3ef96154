"""What to measure: the classes that a pipeline may take, each at several sizes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, Final, NamedTuple

from horizonserve.slo import Output, RequestClass
from horizonserve.workload import Item

#: Enough of a text answer for a time per token; its first token does not depend on the rest.
TEXT_ANSWER_TOKENS: Final = 16
IMAGE_ANSWER_TOKENS: Final = 16


class Asked(NamedTuple):
    """What a request brings."""

    prompt_words: int
    audio_ms: int
    image_px: int
    video_frames: int


@dataclass(frozen=True, slots=True)
class Cell:
    """Requests of one class and one size."""

    request_class: RequestClass
    prompt_words: int
    answer_tokens: int
    audio_ms: int = 0
    image_px: int = 0
    video_frames: int = 0

    @property
    def asked(self) -> Asked:
        """What it brings, whatever it asks for."""
        return Asked(self.prompt_words, self.audio_ms, self.image_px, self.video_frames)

    def item(self, seed: int) -> Item:
        """A request of this size; the seed decides its words and the bytes of its media."""
        return Item(
            at_s=0.0,
            request_class=self.request_class,
            prompt_words=self.prompt_words,
            output_tokens=self.answer_tokens,
            seed=seed,
            audio_ms=self.audio_ms,
            image_px=self.image_px,
            video_frames=self.video_frames,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "request_class": self.request_class.value}


@dataclass(frozen=True, slots=True)
class Grid:
    """The sizes; every class takes those of its input, at each length of its answer."""

    #: Prompts of text alone, and the words beside media.
    words: tuple[int, ...] = (16, 64, 256, 1_024)
    words_beside_media: int = 16
    audio_ms: tuple[int, ...] = (1_000, 4_000, 10_000)
    image_px: tuple[int, ...] = (112, 224, 448)
    video_frames: tuple[int, ...] = (2, 4, 8)
    video_px: int = 112
    audio_answer_tokens: tuple[int, ...] = (32, 96)

    def cells(self, request_class: RequestClass) -> list[Cell]:
        """The sizes of a class, small ones first."""
        beside = self.words_beside_media
        inputs: dict[str, Sequence[tuple[int, int, int, int]]] = {
            "t": [(words, 0, 0, 0) for words in self.words],
            "a": [(beside, ms, 0, 0) for ms in self.audio_ms],
            "i": [(beside, 0, px, 0) for px in self.image_px],
            "v": [(beside, 0, self.video_px, frames) for frames in self.video_frames],
        }
        answers: dict[Output, tuple[int, ...]] = {
            Output.TEXT: (TEXT_ANSWER_TOKENS,),
            Output.AUDIO: self.audio_answer_tokens,
            Output.IMAGE: (IMAGE_ANSWER_TOKENS,),
        }
        sizes = product(inputs[request_class.value[0]], answers[request_class.output])
        return [
            Cell(request_class, words, answer, audio_ms, px, frames)
            for (words, audio_ms, px, frames), answer in sizes
        ]


def text_of(request_class: RequestClass) -> RequestClass:
    """The class that is asked the same for a text."""
    return RequestClass(f"{request_class.value[0]}2t")


def cells(grid: Grid, classes: Iterable[RequestClass]) -> list[Cell]:
    """The sizes of all these classes, and of the text classes of their inputs.

    Only a text answer says how many tokens its prompt had.
    """
    wanted = list(classes)
    every = dict.fromkeys([*map(text_of, wanted), *wanted])
    return [cell for name in RequestClass if name in every for cell in grid.cells(name)]
