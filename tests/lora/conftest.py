"""The fake driver of the spatial tests, for those of base and LoRA work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FAKES = Path(__file__).parents[1] / "spatial" / "fakes"
sys.path.insert(0, str(FAKES))

import fake_driver  # noqa: E402

fake_library = fake_driver.fake_library
Forked = Callable[..., tuple[dict[str, Any], list[str]]]


@pytest.fixture
def forked(fake_library: Path, tmp_path: Path) -> Forked:
    """What a process that forks says, and what the driver saw; settings as FAKE_* variables."""

    def fork(
        *pairs: tuple[int, int], raising: str = "nothing", **fake: object
    ) -> tuple[dict[str, Any], list[str]]:
        log = tmp_path / "log"
        fake = {"log": log, "who": 1} | fake
        environment = os.environ | {f"FAKE_{key.upper()}": str(fake[key]) for key in fake}
        environment["LD_LIBRARY_PATH"] = str(fake_library)
        environment["CUDA_PYTHON_DISABLE_MAJOR_VERSION_WARNING"] = "1"
        command = [sys.executable, str(FAKES / "fork.py"), json.dumps(pairs), raising]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout)), log.read_text().splitlines()

    return fork
