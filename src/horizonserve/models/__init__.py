"""Random-weight models built on this machine, for tests and for measuring without a GPU.

``make_model`` writes a complete model directory (configuration, weights, tokenizer, processor)
that ``vllm-omni serve`` loads without any network access. ``tiny`` starts fast and is for tests;
``small`` is sized so that its steps cost what a GPU's steps cost, and is the one to measure with.
"""

from __future__ import annotations

from horizonserve.models.build import FAMILIES, SIZES, make_model
from horizonserve.models.store import MARKER, Marker, read_marker

__all__ = ["FAMILIES", "MARKER", "SIZES", "Marker", "make_model", "read_marker"]
