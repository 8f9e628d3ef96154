"""Fetch vLLM's own tests: its source distribution, by the ordinary pip client, into a cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VERSION = "0.30.0"
SHA256 = "5f8f4e890c042ffa1c3e103f81c35e2d96f60a0a175ac43a4adbae7006bef62b"
ARCHIVE = f"vllm-{VERSION}.tar.gz"

# pip prepares metadata even when it only downloads. An isolated build would fetch a whole torch
# for that; these two are all that the metadata step needs beside the packages already installed.
BUILD_REQUIREMENTS = ("setuptools-rust", "setuptools-scm")


class FetchError(RuntimeError):
    """The upstream tests could not be obtained."""


def default_cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "horizonserve" / "conformance"


def ensure_suite(cache: Path) -> Path:
    """The directory that holds vLLM's `tests` package; downloads only if the cache lacks it."""
    suite = cache / f"vllm-{VERSION}"
    if (suite / "tests" / "v1" / "core").is_dir():
        return suite
    cache.mkdir(parents=True, exist_ok=True)
    archive = cache / ARCHIVE
    if not archive.is_file():
        _download(archive)
    _verify(archive)
    _unpack(archive, suite)
    return suite


def _download(archive: Path) -> None:
    # One directory for everything, renamed at the end: an interrupted run leaves no half archive.
    with tempfile.TemporaryDirectory(dir=archive.parent, prefix="fetch-") as scratch:
        build, out = Path(scratch) / "build", Path(scratch) / "out"
        _pip("install", "--quiet", "--target", str(build), *BUILD_REQUIREMENTS)
        _pip(
            "download",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "--no-binary",
            "vllm",
            "--dest",
            str(out),
            f"vllm=={VERSION}",
            env={
                "PYTHONPATH": str(build),
                # Without these the metadata says "0.30.0+<device>" and pip rejects the archive.
                "VLLM_VERSION_OVERRIDE": VERSION,
                "VLLM_TARGET_DEVICE": "empty",
            },
        )
        found = out / ARCHIVE
        if not found.is_file():
            raise FetchError(f"pip reported success but left no {ARCHIVE}")
        found.replace(archive)


def _pip(*args: str, env: dict[str, str] | None = None) -> None:
    command = [sys.executable, "-m", "pip", *args]
    done = subprocess.run(command, env=os.environ | (env or {}), capture_output=True, text=True)
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise FetchError(
            f"`pip {' '.join(args)}` failed ({done.returncode}):\n{tail}\n"
            f"The tests of vLLM {VERSION} are not in the cache; the first run needs a package "
            f"index. On a machine without one, put {ARCHIVE} into the cache directory (--cache)."
        )


def _verify(archive: Path) -> None:
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != SHA256:
        raise FetchError(f"{archive}: sha256 is {digest}, expected {SHA256}; delete it and rerun")


def _unpack(archive: Path, suite: Path) -> None:
    with tempfile.TemporaryDirectory(dir=suite.parent, prefix="unpack-") as scratch:
        with tarfile.open(archive) as tar:
            prefix = f"vllm-{VERSION}/tests/"
            wanted = [m for m in tar.getmembers() if m.name.startswith(prefix)]
            if not wanted:
                raise FetchError(f"{archive} has no tests/ in it")
            tar.extractall(scratch, members=wanted, filter="data")
        shutil.rmtree(suite, ignore_errors=True)
        (Path(scratch) / suite.name).replace(suite)
