"""From a model directory to a server that answers, with the display that goes with it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from horizonserve.bench.compare import Watch
from horizonserve.bench.server import Server, command_line, free_port, serve

BUILD_GUESS_S: Final = 20.0
BOOT_GUESS_S: Final = 100.0


@contextlib.contextmanager
def booted(
    model_dir: Path,
    deploy: Path,
    log_file: Path,
    watch: Watch,
    *,
    make: bool = False,
    scheduler: str = "horizon",
    port: int | None = None,
    extra: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Build the `small` model where there is none, and serve it.

    With ``make`` the directory is one of ours: a model of an older layout in it is built anew.

    Raises:
        ServerError: the server did not start or died.
    """
    if make or not (model_dir / "config.json").exists():
        with watch.step("building the model", BUILD_GUESS_S):
            # Only here: it needs torch, which takes seconds to import.
            from horizonserve.models import make_model

            make_model("qwen2.5-omni", "small", model_dir)
    port = port or free_port()
    argv = command_line(model_dir, deploy, scheduler=scheduler, port=port, extra=extra)
    with contextlib.ExitStack() as stack:
        with watch.step("starting the server", BOOT_GUESS_S) as say:
            server = stack.enter_context(
                serve(argv, port, log_file, env=env, notify=lambda _s, line: say(line))
            )
        yield server
