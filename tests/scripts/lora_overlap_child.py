"""The check of base-LoRA overlap over the fake driver, with CUDA's part of torch on the CPU.

Arguments: what is to be wrong, or nothing; then those of the check.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests" / "spatial" / "fakes")]

import fake_torch  # noqa: E402
import torch  # noqa: E402

from horizonserve import facts  # noqa: E402
from horizonserve.profile import Platform  # noqa: E402
from horizonserve.spatial import torch_streams  # noqa: E402

torch_streams.TorchStreams = fake_torch.Streams  # type: ignore[assignment, misc]
facts.platform = lambda: Platform(device="fake device", units=132)
# Two layers side by side save a millisecond.
fake_torch.install(lambda launches: 20.0 - launches / 2)


if sys.argv[1] == "kernel":
    right = fake_torch.Punica.add_shrink

    def add_shrink(self: fake_torch.Punica, shrunk: torch.Tensor, *arguments: Any) -> None:
        """Wrong where it has a part of the device."""
        right(self, shrunk, *arguments)
        if fake_torch.current[0]:
            shrunk *= 1.5

    fake_torch.Punica.add_shrink = add_shrink  # type: ignore[assignment, method-assign]

import lora_overlap_check  # noqa: E402

sys.exit(lora_overlap_check.main(sys.argv[2:]))
