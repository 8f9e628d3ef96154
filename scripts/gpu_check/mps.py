"""An MPS daemon of the check's own, from `scripts/mps`, in a private directory."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from gpu_check.child import NotTested

SCRIPT: Final = Path(__file__).resolve().parents[1] / "mps"
#: Of the script, which ends what it waits for before that.
_LIMIT_S: Final = 20.0
_VARIABLES: Final = (
    "CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_MPS_LOG_DIRECTORY",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "CUDA_MPS_SM_PARTITION",
)


def without_mps(environment: Mapping[str, str], directory: Path) -> dict[str, str]:
    """The environment of a process that finds no daemon, not even one of the machine's own."""
    plain = {key: environment[key] for key in environment if key not in _VARIABLES}
    return plain | {"CUDA_MPS_PIPE_DIRECTORY": str(directory.with_name("no-mps"))}


class Mps:
    """The daemon, started when a part asks for it."""

    def __init__(self, environment: Mapping[str, str], directory: Path) -> None:
        """``directory`` is the daemon's; it is there only while the daemon runs."""
        self._directory = directory
        self._plain = {key: environment[key] for key in environment if key not in _VARIABLES}
        self._client: dict[str, str] | None = None
        self._refusal: str | None = None

    def environment(self) -> dict[str, str]:
        """The environment of a client.

        Raises:
            NotTested: the daemon does not start, or did not when it was first asked for.
        """
        if self._refusal is not None:
            raise NotTested(self._refusal)
        if self._client is None:
            try:
                exports = self._script("start")
            except NotTested as error:
                self._refusal = str(error)
                raise
            words = [shlex.split(line) for line in exports.splitlines()]
            settings = [word for line in words if line[:1] == ["export"] for word in line[1:]]
            self._client = self._plain | dict(word.split("=", 1) for word in settings)
        return self._client

    def stop(self) -> None:
        """End the daemon, if it was started; a part that asks for one afterwards gets a new one.

        Raises:
            NotTested: it does not end; its directory is left for `scripts/mps stop`.
        """
        if self._client is not None:
            self._client = None
            self._script("stop")

    def _script(self, action: str) -> str:
        """What the script printed on its standard output. Raises NotTested: it failed."""
        command = [sys.executable, str(SCRIPT), action, "--dir", str(self._directory)]
        try:
            done = subprocess.run(
                command, env=self._plain, capture_output=True, text=True, timeout=_LIMIT_S
            )
        except subprocess.TimeoutExpired as error:
            raise NotTested(f"scripts/mps {action}: no end after {_LIMIT_S:.0f} s") from error
        if done.returncode:
            raise NotTested(f"scripts/mps {action}: {done.stderr.strip()}")
        return done.stdout
