"""The command line of the server, as far as it goes without starting one."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from horizonserve.bench.server import command_line, environment
from horizonserve.config import Settings
from horizonserve.serving import launch

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("arguments", "env", "status", "message"),
    [
        (["--scheduler", "fast"], {}, 2, "invalid choice: 'fast'"),
        (["--scheduler", "edf"], {"HORIZON_SLO_TEXT_MS": "abc"}, 1, "HORIZON_SLO_TEXT_MS='abc'"),
        (["--help=HorizonServe"], {}, 0, "--scheduler {default,edf,horizon,halo,"),
    ],
)
def test_the_command_line_refuses_what_is_wrong_before_it_starts_anything(
    tiny_model: Path,
    tiny_deploy: Path,
    tmp_path: Path,
    arguments: list[str],
    env: dict[str, str],
    status: int,
    message: str,
) -> None:
    argv = command_line(tiny_model, tiny_deploy, scheduler="horizon", port=1)
    at = argv.index("--scheduler")
    argv[at : at + 2] = arguments
    done = subprocess.run(
        argv, env=environment(tmp_path, env), capture_output=True, text=True, timeout=200
    )
    assert done.returncode == status, done.stderr[-2000:]
    assert message in done.stdout + done.stderr


HOSPITAL = Path(__file__).parents[2] / "configs" / "services" / "hospital.yaml"


def test_a_step_must_hold_the_adapters_of_all_services() -> None:
    args = SimpleNamespace(scheduler_cls=None, enable_lora=True, max_loras=3)
    settings = Settings(scheduler="halo", services=str(HOSPITAL))
    with pytest.raises(SystemExit, match=r"4 services .* --max-loras=3; give --max-loras 4"):
        launch._enable_plain(args, settings)


def test_a_bad_table_of_services_stops_the_start(tmp_path: Path) -> None:
    args = SimpleNamespace(scheduler_cls=None, enable_lora=False)
    settings = Settings(scheduler="halo", services=str(tmp_path / "none.yaml"))
    with pytest.raises(SystemExit, match=r"services=.*none\.yaml.*cannot be read"):
        launch._enable_plain(args, settings)
