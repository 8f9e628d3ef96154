"""How stages get their loop: vLLM's real worker wrapper, around workers that do nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm_omni")
pytestmark = pytest.mark.vllm

import vllm.v1.engine.core  # noqa: E402, F401 (a stage process has it before it loads plugins)
from vllm.config import CUDAGraphMode  # noqa: E402
from vllm.v1.worker.worker_base import WorkerWrapperBase  # noqa: E402

from horizonserve.config import Settings  # noqa: E402
from horizonserve.serving import compat, hooks  # noqa: E402
from horizonserve.spatial import monitor as module  # noqa: E402
from horizonserve.spatial.monitor import VARIABLE, Monitor  # noqa: E402
from horizonserve.spatial.null import NullBackend  # noqa: E402
from horizonserve.spatial.stage import SharedStage  # noqa: E402

#: To be shut down at the end of a test: with the shared stage goes its thread.
WRAPPERS: list[Any] = []


@pytest.fixture(autouse=True)
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Environment and state of a server's process, put back afterwards."""
    monkeypatch.setattr(module, "DIRECTORY", tmp_path)
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setenv("HORIZON_SPATIAL_BACKEND", "dry-run")
    monkeypatch.setenv("HORIZON_SCHEDULER", "horizon")
    monkeypatch.setattr(WorkerWrapperBase, "init_device", WorkerWrapperBase.init_device)
    monkeypatch.setattr(hooks, "shared", None)
    monkeypatch.setattr(hooks, "described", {"state": "not prepared"})
    yield
    for wrapper in WRAPPERS:
        wrapper.shutdown()
    WRAPPERS.clear()


@pytest.fixture
def record(server: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Monitor]:
    made = Monitor.create()
    yield made
    made.close()


class Worker:
    """What the hooks use of a worker."""

    def __init__(self, stage: int = 0, **parallel: Any) -> None:
        settings = {"world_size": 1, "data_parallel_size": 1} | parallel
        settings.setdefault("distributed_executor_backend", "uni")
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(stage_id=stage, enforce_eager=True),
            parallel_config=SimpleNamespace(**settings),
        )
        self.device = torch.device("cpu")
        self.calls: list[str] = []

    def init_device(self) -> None:
        self.calls.append("init_device")

    def execute_model(self, output: Any) -> str:
        self.calls.append("execute_model")
        return "output"

    def sample_tokens(self, grammar: Any) -> str:
        self.calls.append("sample_tokens")
        return "tokens"

    def shutdown(self) -> None:
        self.calls.append("shutdown")


def wrapped(worker: Any) -> Any:
    """The worker behind vLLM's wrapper, its device initialised."""
    hooks.install()
    wrapper = WorkerWrapperBase()
    wrapper.vllm_config = worker.vllm_config
    wrapper.worker = worker
    wrapper.mm_receiver_cache = None
    WRAPPERS.append(wrapper)
    wrapper.init_device()
    assert worker.calls.pop() == "init_device"
    return wrapper


def decisions() -> list[Any]:
    assert hooks.shared is not None and isinstance(hooks.shared.backend, NullBackend)
    return list(hooks.shared.backend.decisions)


def test_every_name_of_upstream_exists() -> None:
    compat.require(compat.WORKER + compat.DIFFUSION_WORKER)


def test_forward_and_sampling_run_at_the_level(record: Monitor) -> None:
    wrapper = wrapped(Worker())
    assert hooks.described["state"] == "prepared"
    step = SimpleNamespace(total_num_scheduled_tokens=3)
    assert wrapper.execute_model(step) == "output"
    assert wrapper.sample_tokens(None) == "tokens"
    assert len(decisions()) == 2
    wrapper.execute_model(SimpleNamespace(total_num_scheduled_tokens=0))
    assert len(decisions()) == 2
    assert wrapper.worker.calls == ["execute_model", "sample_tokens", "execute_model"]


def test_a_worker_that_is_shut_down_leaves_the_record(record: Monitor) -> None:
    wrapper = wrapped(Worker())
    wrapper.execute_model(SimpleNamespace(total_num_scheduled_tokens=3))
    assert record.read(0) is not None
    wrapper.shutdown()
    assert record.read(0) is None and wrapper.worker.calls[-1] == "shutdown"


def test_what_one_stage_refused_is_not_said_again_by_the_others(
    record: Monitor, vllm_log: pytest.LogCaptureFixture
) -> None:
    wrapped(Worker(1, world_size=2))
    wrapped(Worker(2))
    assert hooks.described == {"state": "refused", "why": record.vetoed()}
    assert len([line for line in vllm_log.messages if "no spatial control" in line]) == 1


def test_a_shared_stage_whose_worker_is_out_of_reach_says_so(record: Monitor) -> None:
    hooks.install()
    assert hooks.describe()["state"] == "refused"
    assert "another process" in (record.vetoed() or "")
    wrapped(Worker())  # as if it came later
    assert hooks.shared is None


def test_what_a_prepared_stage_says_stays(record: Monitor) -> None:
    wrapped(Worker())
    assert hooks.describe() is hooks.described and record.vetoed() is None


def test_installing_twice_hooks_once(record: Monitor) -> None:
    hooks.install()
    once = WorkerWrapperBase.init_device
    hooks.install()
    assert WorkerWrapperBase.init_device is once


def test_without_a_record_nothing_is_hooked() -> None:
    stock = WorkerWrapperBase.init_device
    hooks.install()
    assert WorkerWrapperBase.init_device is stock


@pytest.mark.parametrize(
    ("worker", "why"),
    [
        (Worker(world_size=2), "2 processes"),
        (Worker(data_parallel_size=2), "2 processes"),
        (Worker(distributed_executor_backend="ray"), "without Ray"),
        (Worker(distributed_executor_backend="mp"), "another process than its scheduler"),
    ],
)
def test_a_stage_that_is_not_one_process_on_one_gpu_is_refused_for_all(
    record: Monitor, worker: Worker, why: str
) -> None:
    wrapped(worker)
    assert hooks.shared is None
    assert hooks.described["state"] == "refused" and why in hooks.described["why"]
    assert why in (record.vetoed() or "")
    assert worker.execute_model.__func__ is Worker.execute_model  # type: ignore[attr-defined]


def test_graphs_are_refused_where_contexts_would_not_bind_them() -> None:
    config = Worker().vllm_config
    config.model_config.enforce_eager = False
    config.compilation_config = SimpleNamespace(
        cudagraph_mode=CUDAGraphMode.FULL, cudagraph_mm_encoder=False
    )
    config.parallel_config.use_ubatching = False
    assert "enforce_eager" in (hooks._llm_refusal(config, 0, "green", False) or "")
    assert hooks._llm_refusal(config, 0, "green", True) is None
    assert hooks._llm_refusal(config, 0, "cores", False) is None


def test_a_second_replica_of_a_stage_refuses_for_all(record: Monitor) -> None:
    wrapped(Worker())
    first = hooks.shared
    assert isinstance(first, SharedStage)
    pid = os.fork()
    if pid == 0:
        hooks.shared = None
        wrapped(Worker())
        os._exit(0 if hooks.shared is None else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert f"process {os.getpid()} has it" in (record.vetoed() or "")


@pytest.mark.parametrize("backend", ["green", "auto"])
def test_green_contexts_without_a_gpu_are_refused(
    record: Monitor, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HORIZON_SPATIAL_BACKEND", backend)
    wrapped(Worker())
    assert "needs a CUDA device" in hooks.described["why"]


def test_an_image_stage_runs_inside_the_loop(record: Monitor) -> None:
    class Diffusion:
        stage_id = 1
        od_config = SimpleNamespace(num_gpus=1)
        device = torch.device("cpu")

        def execute_model(self, request: str, **more: int) -> tuple[str, Any]:
            return request, record.read(1)

        execute_model_batch = execute_stepwise = execute_model

        def shutdown(self) -> None: ...

    worker = Diffusion()
    hooks._attach_diffusion(worker)
    for name in ("execute_model", "execute_model_batch", "execute_stepwise"):
        said, seen = getattr(worker, name)("image", steps=1)
        assert said == "image" and seen.state.active
    assert (reading := record.read(1)) is not None and not reading.state.active


@pytest.mark.parametrize(
    ("settings", "environment", "made"),
    [
        ({"spatial_backend": "cores"}, {}, True),
        ({"spatial_backend": "auto"}, {}, False),  # there is no GPU here
        ({"spatial_backend": "cores", "spatial": False}, {}, False),
        ({"spatial_backend": "cores", "scheduler": "edf"}, {}, False),
        ({"spatial_backend": "green"}, {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"}, False),
    ],
)
def test_the_launching_process_makes_the_record_where_it_will_be_used(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    settings: dict[str, Any],
    environment: dict[str, str],
    made: bool,
) -> None:
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    hooks.prepare(Settings(**{"scheduler": "horizon"} | settings))
    assert os.environ[VARIABLE].startswith(module.PREFIX) is made
    files = list(tmp_path.iterdir())
    assert len(files) == made
    if not made:
        hooks.install()
        assert hooks.described == {"state": "not prepared", "why": os.environ[VARIABLE]}


def test_every_start_removes_what_a_dead_server_left(tmp_path: Path) -> None:
    leftover = tmp_path / f"{module.PREFIX}{2**22 + 1}"
    leftover.write_bytes(b"")
    hooks.prepare(Settings(scheduler="edf"))
    assert not leftover.exists()


def test_it_goes_on_without_what_the_loop_needs(
    record: Monitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, record.path.name + "9")
    wrapped(Worker())
    assert hooks.shared is None and hooks.described["state"] == "refused"
