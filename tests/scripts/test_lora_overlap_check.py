"""The check of base-LoRA overlap, as far as it goes without a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "lora_overlap_check.py"


def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    out = tmp_path / "out"
    command = [sys.executable, str(SCRIPT), "model", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("lora_overlap_check: ") and "no CUDA device" in done.stderr
    assert not out.exists()
