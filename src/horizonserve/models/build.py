"""Choose the builder of a model family and run it into a directory."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import cast

from horizonserve.models.store import SCHEMA_VERSION, Marker, new_directory, read_marker

# Family name -> module with ``build(size, out, seed)``. Imported on use: each needs torch.
FAMILIES: dict[str, str] = {
    "qwen2.5-omni": "horizonserve.models.qwen2_5_omni",
    "bagel": "horizonserve.models.bagel",
    "mimo-audio": "horizonserve.models.mimo_audio",
    "llama-lora": "horizonserve.models.llama_lora",
}
SIZES: tuple[str, ...] = ("tiny", "small")


def make_model(family: str, size: str, out: Path, seed: int = 0) -> Path:
    """Build a random-weight model in ``out`` and return that path.

    The same family, size and seed give the same files. A directory that already holds exactly
    this model is returned as it is; one that holds another model made by this function is
    replaced; anything else that is not empty is refused with :class:`FileExistsError`.
    """
    if family not in FAMILIES:
        raise ValueError(f"family: {family!r} is not one of {', '.join(FAMILIES)}")
    if size not in SIZES:
        raise ValueError(f"size: {size!r} is not one of {', '.join(SIZES)}")
    if seed < 0:
        raise ValueError(f"seed: {seed} is negative; use 0 or more")
    marker = Marker(family=family, size=size, seed=seed, schema_version=SCHEMA_VERSION)
    if read_marker(out) == marker:
        return out
    build = cast("Callable[[str, Path, int], None]", import_module(FAMILIES[family]).build)
    with new_directory(out, marker) as work:
        build(size, work, seed)
    return out
