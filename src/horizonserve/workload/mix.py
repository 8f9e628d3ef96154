"""What the traffic is made of: one frozen dataclass with every parameter of a trace."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from horizonserve.slo import Output, RequestClass

Range = tuple[int, int]
Shares = tuple[tuple[RequestClass, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Classes, prompt lengths and answer lengths of a request stream. Ranges are inclusive.

    Prompts have the same lengths in every class: most are short (uniform in ``short_words``), a
    share ``long_prompt_share`` is long (log-uniform in ``long_words``, so that lengths near the
    upper end are rare). Answers are uniform in the range of their output modality, counted in
    tokens of the shared stage.
    """

    #: Share of each class; they sum to 1.
    shares: Shares = ((RequestClass.T2T, 0.7), (RequestClass.T2A, 0.3))
    short_words: Range = (10, 60)
    long_words: Range = (60, 1_000)
    long_prompt_share: float = 0.2
    text_tokens: Range = (32, 128)
    audio_tokens: Range = (32, 128)
    #: Most image pipelines generate no text on the way; the bound only stops one that does.
    image_tokens: Range = (16, 16)
    #: Sizes of media in the prompt, for the classes that have some.
    audio_input_ms: Range = (1_000, 4_000)
    image_input_px: Range = (112, 224)
    video_input_frames: Range = (4, 8)
    video_input_px: Range = (112, 112)

    def __post_init__(self) -> None:
        total = math.fsum(share for _, share in self.shares)
        if not math.isclose(total, 1.0, abs_tol=1e-9):
            raise ValueError(f"shares: sum to {total:g}; they must sum to 1")
        if len({name for name, _ in self.shares}) != len(self.shares):
            raise ValueError("shares: a class is named twice; name each class once")
        for name, share in self.shares:
            if not 0 <= share <= 1:
                raise ValueError(f"shares: {name.value} has {share:g}; give 0 to 1")
        if not 0 <= self.long_prompt_share <= 1:
            raise ValueError(f"long_prompt_share: {self.long_prompt_share:g}; give 0 to 1")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("shares", "long_prompt_share"):
                continue
            low, high = value
            if not 1 <= low <= high:
                raise ValueError(f"{field.name}: {value}; give 1 <= low <= high")

    @classmethod
    def of_audio_share(cls, audio_share: float) -> Mix:
        """Text in, ``audio_share`` of it answered with audio and the rest with text."""
        return cls(shares=((RequestClass.T2T, 1 - audio_share), (RequestClass.T2A, audio_share)))

    @property
    def classes(self) -> tuple[RequestClass, ...]:
        """The classes that occur, in the order of ``shares``."""
        return tuple(name for name, share in self.shares if share > 0)

    def tokens_of(self, output: Output) -> Range:
        """Range of answer lengths of an output modality."""
        ranges = {
            Output.TEXT: self.text_tokens,
            Output.AUDIO: self.audio_tokens,
            Output.IMAGE: self.image_tokens,
        }
        return ranges[output]

    def alone(self, request_class: RequestClass) -> Mix:
        """The same traffic reduced to one class."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return Mix(**{**values, "shares": ((request_class, 1.0),)})

    def to_json(self) -> dict[str, Any]:
        """Plain data that ``from_json`` reads back."""
        plain = asdict(self)
        plain["shares"] = {name.value: share for name, share in self.shares}
        return plain

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Mix:
        """The mix of ``to_json``."""

        def value(name: str, raw: Any) -> Any:
            if name == "shares":
                return _shares(raw.items())
            return tuple(raw) if isinstance(raw, list) else raw

        return cls(**{name: value(name, raw) for name, raw in plain.items()})


def _shares(pairs: Iterable[tuple[str, float]]) -> Shares:
    return tuple((RequestClass(name), float(share)) for name, share in pairs)
