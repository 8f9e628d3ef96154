"""Plain keys and values out of the CPU's attention cache.

vLLM's CPU attention keeps keys (and, on some processors, values) in the order its matrix kernels
read them. A cache that leaves the stage, as BAGEL's does for its image stage, must be in plain
order first; vLLM-Omni knows the GPU's layouts only and would take this one for one of those.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

_INTEGER = {2: torch.int16, 4: torch.int32}


def send_plain(manager: Any) -> None:
    """Make ``manager``, which sends a stage's cache to the next stage, send it in plain order."""
    stock = manager._extract_kv_cache

    def extract(
        request: str, blocks: list[int], length: int, layers: list[torch.Tensor], *rest: Any
    ) -> Any:
        taken = [plain(layer[blocks]) for layer in layers]
        return stock(request, list(range(len(blocks))), length, taken, *rest)

    manager._extract_kv_cache = extract


def plain(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of cache ``blocks``, each as (block, token, head, element).

    ``blocks`` is a part of one layer's cache, (block, head, tokens of a block, 2 x elements). For
    each block and head it holds all keys, then all values.
    """
    count, heads, tokens, both = blocks.shape
    stored = blocks.reshape(count, heads, 2, -1)
    shape = (count, heads, tokens, both // 2)
    keys, values = (
        stored[:, :, which, order].view(shape).transpose(1, 2)
        for which, order in enumerate(_order(tokens, both // 2, blocks.dtype))
    )
    return keys, values


@cache
def _order(tokens: int, elements: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the kernel puts each element of a block, for keys and for values.

    Found by letting it store numbers, since its layouts are described nowhere. It only moves
    bits, so small integers serve whatever they mean as floats.
    """
    token, element = torch.meshgrid(torch.arange(tokens), torch.arange(elements), indexing="ij")
    # Twice, because 16 bits may be too few to number all elements at once.
    of_token, of_element = _stored(token, dtype), _stored(element, dtype)
    keys, values = (
        torch.argsort(at_token * elements + at_element)
        for at_token, at_element in zip(of_token, of_element, strict=True)
    )
    return keys, values


def _stored(numbers: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """Let the kernel store ``numbers`` (token, element); return its keys and values in order."""
    tokens, elements = numbers.shape
    given = numbers.to(_INTEGER[dtype.itemsize]).view(dtype).unsqueeze(1)
    memory = torch.zeros(1, 1, 2 * tokens, elements, dtype=dtype)
    keys, values = memory.chunk(2, dim=2)
    isa = _get_attn_isa(dtype, tokens, elements)
    ops.cpu_attn_reshape_and_cache(given, given, keys, values, torch.arange(tokens), isa)
    return [
        part.contiguous().view(_INTEGER[dtype.itemsize]).flatten().long() for part in (keys, values)
    ]
