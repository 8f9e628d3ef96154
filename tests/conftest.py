"""Shared by all tests: one real server with the tiny model, booted when first asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from horizonserve.bench.boot import booted
from horizonserve.bench.compare import Watch
from horizonserve.bench.server import Server, ServerError

# Two cores that also run servers: a slow example is no failure.
settings.register_profile("horizonserve", deadline=None)
settings.load_profile("horizonserve")


@pytest.fixture(scope="session")
def tiny_deploy() -> Path:
    return Path(__file__).parents[1] / "configs" / "deploy" / "qwen2_5_omni_tiny.yaml"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("vllm_omni")
    from horizonserve.models import make_model

    return make_model("qwen2.5-omni", "tiny", tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def server(
    tiny_model: Path, tiny_deploy: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    log_file = tmp_path_factory.mktemp("log") / "server.log"
    # The last test that uses it kills it, which a server's context takes as an error.
    with (
        contextlib.suppress(ServerError),
        # The CPU cores stand in for SMs, so that spatial control is live in every one of them.
        booted(
            tiny_model,
            tiny_deploy,
            log_file,
            Watch(),
            env={
                "HORIZON_SPATIAL_BACKEND": "cores",
                "HORIZON_STEP_LOG": str(log_file.with_name("steps.jsonl")),
            },
        ) as one,
    ):
        yield one
