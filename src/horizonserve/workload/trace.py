"""Poisson traces: who arrives when, with what, and how long the answer is."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from horizonserve.slo import RequestClass
from horizonserve.workload.mix import Mix, Range

FORMAT: Final = "horizonserve-trace-1"
#: Guards against a typing error in a rate, not against a real experiment.
MAX_ITEMS: Final = 100_000


@dataclass(frozen=True, slots=True)
class Item:
    """One request of a trace."""

    at_s: float
    request_class: RequestClass
    prompt_words: int
    output_tokens: int
    #: Decides the words of the prompt and the bytes of its media.
    seed: int
    #: Size of the media in the prompt; 0 where the class has none of that kind.
    audio_ms: int = 0
    image_px: int = 0
    video_frames: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival, within ``duration_s``."""

    items: tuple[Item, ...]
    rate_rps: float
    duration_s: float
    seed: int

    def to_jsonl(self) -> str:
        """A header line, then one line per request."""
        head = {
            "format": FORMAT,
            "rate_rps": self.rate_rps,
            "duration_s": self.duration_s,
            "seed": self.seed,
        }
        return "".join(json.dumps(line) + "\n" for line in (head, *map(asdict, self.items)))

    @classmethod
    def from_jsonl(cls, text: str) -> Trace:
        """The trace of ``to_jsonl``.

        Raises:
            ValueError: not such a text; the message names the line.
        """
        lines = text.splitlines()
        head = _object(lines[0] if lines else "", 1)
        if head.get("format") != FORMAT:
            raise ValueError(f"line 1: format {head.get('format')!r}, expected {FORMAT!r}")
        items = []
        for number, line in enumerate(lines[1:], start=2):
            plain = _object(line, number)
            try:
                plain["request_class"] = RequestClass(plain["request_class"])
                items.append(Item(**plain))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"line {number}: not a request of a trace ({error})") from error
        return cls(tuple(items), head["rate_rps"], head["duration_s"], head["seed"])


def make_trace(mix: Mix, rate_rps: float, duration_s: float, seed: int) -> Trace:
    """A Poisson trace: the same arguments give the same trace.

    Arrivals and contents come from separate streams of the seed, so the k-th request of two
    traces that differ only in their rate is the same, and its arrival is scaled. Rates are thus
    compared on common random numbers.
    """
    for name, value in (("rate_rps", rate_rps), ("duration_s", duration_s)):
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name}: {value}; give a finite number above 0")
    if rate_rps * duration_s > MAX_ITEMS / 2:
        raise ValueError(
            f"rate_rps x duration_s: {rate_rps * duration_s:g} requests, at most {MAX_ITEMS // 2}"
        )
    gaps, contents = (np.random.default_rng([seed, stream]) for stream in (0, 1))
    items: list[Item] = []
    at_s = gaps.exponential() / rate_rps
    while at_s < duration_s:
        items.append(_draw(mix, at_s, contents))
        at_s += gaps.exponential() / rate_rps
    return Trace(tuple(items), rate_rps, duration_s, seed)


def _draw(mix: Mix, at_s: float, rng: np.random.Generator) -> Item:
    # Every draw is made for every item, needed or not: one parameter changes one thing.
    names = [name for name, _ in mix.shares]
    cumulative = np.cumsum([share for _, share in mix.shares])
    index = int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right"))
    request_class = names[min(index, len(names) - 1)]
    is_long = rng.random() < mix.long_prompt_share
    words = _log_uniform(rng, mix.long_words), _uniform(rng, mix.short_words)
    tokens = _uniform(rng, mix.tokens_of(request_class.output))
    seed = int(rng.integers(2**31))
    audio_ms = _uniform(rng, mix.audio_input_ms)
    image_px = _uniform(rng, mix.image_input_px)
    frames = _uniform(rng, mix.video_input_frames)
    frame_px = _uniform(rng, mix.video_input_px)
    media = request_class.value[0]
    return Item(
        at_s=at_s,
        request_class=request_class,
        prompt_words=words[0] if is_long else words[1],
        output_tokens=tokens,
        seed=seed,
        audio_ms=audio_ms if media == "a" else 0,
        image_px={"i": image_px, "v": frame_px}.get(media, 0),
        video_frames=frames if media == "v" else 0,
    )


def _uniform(rng: np.random.Generator, bounds: Range) -> int:
    low, high = bounds
    # A fraction of the range rather than an integer draw: it uses the stream equally for all.
    return low + int(rng.random() * (high - low + 1))


def _log_uniform(rng: np.random.Generator, bounds: Range) -> int:
    low, high = bounds
    return round(low * math.exp(rng.random() * math.log(high / low)))


def _object(line: str, number: int) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"line {number}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"line {number}: not a JSON object")
    return value


def counts(items: Iterable[Item]) -> dict[RequestClass, int]:
    """How many requests of each class."""
    result: dict[RequestClass, int] = {}
    for item in items:
        result[item.request_class] = result.get(item.request_class, 0) + 1
    return result
