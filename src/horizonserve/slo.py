"""Request classes, their paths, and the promise each class is given.

A class is input modality x output modality (papers: HorizonServe 4.2). Its path is *short* when
the first response leaves the shared stage (text) and *long* when downstream stages make it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Final

#: The shortest promise, in milliseconds; a shorter one is a mistake, and near 0 no number works.
LEAST_MS: Final = 0.01


class Output(StrEnum):
    """Output modality of a request."""

    TEXT = "text"
    AUDIO = "audio"
    IMAGE = "image"

    __hash__ = str.__hash__  # Enum's own is a Python call, on the path of every request


class Path(StrEnum):
    """Where the first response of a request is made (HorizonServe 2.2)."""

    SHORT = "short"
    LONG = "long"


class RequestClass(StrEnum):
    """Input modality, the digit 2, output modality."""

    T2T = "t2t"
    A2T = "a2t"
    I2T = "i2t"
    V2T = "v2t"
    T2A = "t2a"
    A2A = "a2a"
    I2A = "i2a"
    V2A = "v2a"
    T2I = "t2i"
    I2I = "i2i"

    __hash__ = str.__hash__

    @property
    def output(self) -> Output:
        return _OUTPUT_OF_LETTER[self.value[2]]

    @property
    def path(self) -> Path:
        return Path.SHORT if self.output is Output.TEXT else Path.LONG


_FROM_TEXT: Final = {
    Output.TEXT: RequestClass.T2T,
    Output.AUDIO: RequestClass.T2A,
    Output.IMAGE: RequestClass.T2I,
}
_OUTPUT_OF_LETTER: Final = {"t": Output.TEXT, "a": Output.AUDIO, "i": Output.IMAGE}

#: The paper's ``priority`` field (HorizonServe 5): 0 text, 10 audio, 20 image.
OUTPUT_OF_PRIORITY: Final = {0: Output.TEXT, 10: Output.AUDIO, 20: Output.IMAGE}

# The heaviest input decides: a video costs more encoder time than its sound track or a picture.
_INPUT_LETTERS: Final = (("video", "v"), ("audio", "a"), ("image", "i"))


def class_of(inputs: Sequence[str], output: Output) -> RequestClass:
    """The class of a request with these multimodal inputs and this output.

    Inputs are modality names as vLLM spells them (``audio``, ``image``, ``video``); text is
    implied. An image made from sound or video has no class of its own and counts as ``i2i``.
    """
    if not inputs:
        return _FROM_TEXT[output]
    present = set(inputs)
    letter = next((letter for name, letter in _INPUT_LETTERS if name in present), "t")
    if output is Output.IMAGE and letter != "t":
        return RequestClass.I2I
    return RequestClass(f"{letter}2{output.value[0]}")
