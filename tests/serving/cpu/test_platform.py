"""The platform is offered on a CPU only, and borrows nothing that upstream lacks."""

from __future__ import annotations

import importlib
import importlib.metadata
from operator import attrgetter
from types import SimpleNamespace

import pytest

from horizonserve.serving.cpu import PLATFORM, REQUIRED, REQUIRED_DIFFUSION, cpu_platform

platforms = pytest.importorskip("vllm.platforms")


@pytest.mark.parametrize(("is_cpu", "expected"), [(True, PLATFORM), (False, None)])
def test_offered_only_where_vllm_runs_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, is_cpu: bool, expected: str | None
) -> None:
    fake = SimpleNamespace(is_cpu=lambda: is_cpu)
    monkeypatch.setattr(platforms, "_current_platform", fake)
    assert cpu_platform() == expected


@pytest.mark.vllm
def test_the_entry_point_stays_a_function_when_its_module_is_loaded() -> None:
    pytest.importorskip("vllm_omni")
    importlib.import_module(PLATFORM.rpartition(".")[0])
    (entry,) = importlib.metadata.entry_points(
        group="vllm_omni.platform_plugins", name="horizonserve_cpu"
    )
    assert entry.load()() == PLATFORM


@pytest.mark.vllm
def test_path_resolves_to_a_platform_with_workers() -> None:
    pytest.importorskip("vllm_omni")
    module, _, name = PLATFORM.rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    for worker in (cls.get_omni_ar_worker_cls(), cls.get_omni_generation_worker_cls()):
        module, _, name = worker.rpartition(".")
        assert hasattr(importlib.import_module(module), name)
    free, total = cls.get_device_memory()
    assert 0 < free <= total
    assert cls.get_torch_device(3).type == "cpu"


@pytest.mark.vllm
@pytest.mark.parametrize(("module", "path"), REQUIRED + REQUIRED_DIFFUSION)
def test_borrowed_name_exists(module: str, path: str) -> None:
    pytest.importorskip("vllm_omni")
    assert callable(attrgetter(path)(importlib.import_module(module)))
