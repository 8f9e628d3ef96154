"""The words of a prompt, from a seed.

Every word is one of the commonest of English, so that it is one token for most tokenizers, the
one of the random-weight models included.
"""

from __future__ import annotations

from typing import Final

import numpy as np

_COMMON: Final = (
    "the of and to in is it you that he was for on are with as his they be at one have this from "
    "or had by hot but some what there we can out other were all your when up use word how said "
    "an each she which do their time if will way about many then them would write like so these "
    "her long make thing see him two has look more day could go come"
)
WORDS: Final = tuple(_COMMON.split())


def prompt(words: int, seed: int) -> str:
    """A prompt of so many words; the same arguments give the same prompt."""
    rng = np.random.default_rng(seed)
    return " ".join(WORDS[index] for index in rng.integers(len(WORDS), size=words))
