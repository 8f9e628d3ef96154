"""The check of base-LoRA overlap, as far as it goes without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_driver import CUDA, compiled, skip_beside_a_real

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


@pytest.fixture
def library(tmp_path: Path) -> Path:
    pytest.importorskip("cuda.bindings")
    pytest.importorskip("vllm")
    skip_beside_a_real(CUDA)
    return compiled("libcuda.c", CUDA, tmp_path)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "llama"
    path.mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128}
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
    (path / "config.json").write_text(json.dumps(config | sizes | {"num_hidden_layers": 2}))
    return path


@pytest.mark.vllm
@pytest.mark.parametrize("fault", ["", "kernel"])
def test_it_runs_to_the_end_over_the_fake_driver(
    library: Path, model: Path, tmp_path: Path, fault: str
) -> None:
    """Streams and times are made up; the layers are computed, and their results compared."""
    child = Path(__file__).with_name("lora_overlap_child.py")
    out, log = tmp_path / "out", tmp_path / "log"
    settings = {
        "LD_LIBRARY_PATH": str(library.parent),
        "CUDA_PYTHON_DISABLE_MAJOR_VERSION_WARNING": "1",
        "FAKE_LOG": str(log),
    }
    arguments = (fault, model, "--out", out, "--tokens", 3, "--max-lora-rank", 8)
    done = subprocess.run(
        [sys.executable, str(child), *map(str, arguments)],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == (1 if fault else 0), done.stdout + done.stderr
    report = json.loads((out / "lora_overlap.json").read_text())
    (row,) = report["rows"]
    # Side by side is faster for this driver, so every layer got a partition.
    assert row["tokens"] == 3
    assert all(sum(pair) == 132 for pair in row["base_and_lora_sms"].values())
    us = row["layer_us"]
    assert us["partitions, shrink"] == us["partitions, full"] < us["sequential"]
    assert "partitions, shrink" in done.stdout
    wrong = {error.split(", ")[1] for error in report["errors"]}
    assert wrong == ({"shrink", "full"} if fault else set())
    assert (out / "table.lora.yaml").exists() and "context" in log.read_text()
