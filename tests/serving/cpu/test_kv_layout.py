"""A cache that vLLM's CPU attention wrote comes out in plain order, on whatever processor."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.vllm
torch = pytest.importorskip("torch")
pytest.importorskip("vllm_omni")

HEADS = 3


def written(tokens: int, block: int, elements: int, dtype: Any) -> tuple[Any, Any, Any, list[int]]:
    """Keys, values, a cache that holds them, and its blocks in the order of the tokens."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    keys, values = torch.randn(2, tokens, HEADS, elements).to(dtype)
    cache = torch.zeros(5, HEADS, block, 2 * elements, dtype=dtype)
    at = cache.view(5, HEADS, 2 * block, elements).chunk(2, dim=2)
    blocks = [3, 1]
    slots = torch.cat([torch.arange(block) + number * block for number in blocks])[:tokens]
    ops.cpu_attn_reshape_and_cache(keys, values, *at, slots, _get_attn_isa(dtype, block, elements))
    return keys, values, cache, blocks


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("block", "elements"), [(32, 32), (128, 64), (128, 128), (32, 80)])
def test_what_went_in_comes_out(block: int, elements: int, dtype: str) -> None:
    from horizonserve.serving.cpu.kv_layout import plain

    tokens = block + 5
    keys, values, cache, blocks = written(tokens, block, elements, getattr(torch, dtype))
    found = plain(cache[blocks])
    assert torch.equal(found[0].flatten(0, 1)[:tokens], keys)
    assert torch.equal(found[1].flatten(0, 1)[:tokens], values)


def test_the_next_stage_gets_it_so() -> None:
    from vllm_omni.distributed.omni_connectors.kv_transfer_manager import OmniKVTransferManager

    from horizonserve.serving.cpu.kv_layout import send_plain

    keys, values, cache, blocks = written(40, 32, 32, torch.bfloat16)
    manager: Any = SimpleNamespace()
    manager._extract_kv_cache = OmniKVTransferManager._extract_kv_cache.__get__(manager)
    send_plain(manager)
    sent = manager._extract_kv_cache("r", blocks, 40, [cache], 32, "auto", {"ropes": [40]})
    assert torch.equal(sent.layer_blocks["key_cache"][0], keys)
    assert torch.equal(sent.layer_blocks["value_cache"][0], values)
    assert sent.metadata["ropes"] == [40]
