"""The door: cheap, idempotent, and without effect until it is used. In fresh processes."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from horizonserve.spatial.monitor import PREFIX

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm


def run(code: str, **env: str) -> str:
    import os

    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={k: v for k, v in os.environ.items() if not k.startswith("HORIZON_")} | env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_base_install_imports_neither_vllm_nor_torch() -> None:
    out = run(
        """
        import sys
        import horizonserve, horizonserve.cli, horizonserve.plugin, horizonserve.instance
        import horizonserve.bench.demo, horizonserve.workload, horizonserve.policy.view
        heavy = ("vllm", "vllm_omni", "torch", "transformers")
        print([name for name in heavy if name in sys.modules])
        """
    )
    assert out.strip() == "[]"


def test_registering_in_a_process_that_builds_no_command_line_loads_nothing_heavy() -> None:
    out = run(
        """
        import sys, time
        began = time.perf_counter()
        from horizonserve import plugin
        plugin.register()
        plugin.register()
        print(time.perf_counter() - began < 5, "vllm" in sys.modules, "torch" in sys.modules)
        """
    )
    assert out.split() == ["True", "False", "False"]


def test_the_flag_is_added_once_and_leaves_the_arguments_before_the_engine_sees_them() -> None:
    out = run(
        """
        import os
        import vllm_omni.entrypoints.cli.serve as serve
        from vllm.engine.arg_utils import EngineArgs
        from vllm_omni.config.pipeline_registry import OMNI_PIPELINES
        from vllm_omni.utils.tracking_parser import TrackingArgumentParser
        from horizonserve import plugin
        from horizonserve.serving.pipelines import SCHEDULER

        stock = EngineArgs.add_cli_args
        before = dict(OMNI_PIPELINES)
        serve.OmniServeCommand.validate = lambda self, args: None
        plugin.register()
        plugin.register()
        parser = TrackingArgumentParser()
        (command,) = serve.cmd_init()
        command.subparser_init(parser.add_subparsers(dest="subparser"))
        args = parser.parse_args(["serve", "m", "--omni", "--scheduler", "default"])
        assert "scheduler" in args.explicit_keys
        command.validate(args)
        assert "scheduler" not in vars(args) and "scheduler" not in args.explicit_keys
        assert EngineArgs.add_cli_args is stock
        assert before == OMNI_PIPELINES, "default changes nothing"
        assert os.environ["HORIZON_SCHEDULER"] == "default"

        args = parser.parse_args(["serve", "m", "--omni", "--scheduler", "edf"])
        command.validate(args)
        assert OMNI_PIPELINES["qwen2_5_omni"].stages[0].scheduler_cls == SCHEDULER
        assert os.environ["HORIZON_SCHEDULER"] == "edf"
        args = parser.parse_args(["serve", "m", "--omni"])
        command.validate(args)
        print("ok")
        """
    )
    assert out.strip().endswith("ok")


def test_a_worker_in_a_process_of_its_own_is_reached_too() -> None:
    out = run(
        """
        import vllm.v1.worker.worker_base as base
        from horizonserve import plugin

        stock = base.WorkerWrapperBase.init_device
        plugin.register()
        print(base.WorkerWrapperBase.init_device is not stock)
        """,
        HORIZON_SCHEDULER="horizon",
        HORIZONSERVE_MONITOR=f"{PREFIX}1",
    )
    assert out.split()[-1] == "True"


def test_plain_vllm_serve_gets_the_plain_class_and_refuses_two_schedulers() -> None:
    out = run(
        """
        import argparse
        import vllm.entrypoints.cli.serve as serve
        import vllm.engine.arg_utils
        from horizonserve import plugin
        from horizonserve.serving import launch

        serve.ServeSubcommand.validate = lambda self, args: None
        plugin.register()
        command = serve.ServeSubcommand()
        args = argparse.Namespace(scheduler="edf", scheduler_cls=None)
        command.validate(args)
        assert vars(args) == {"scheduler_cls": launch.PLAIN_SCHEDULER}
        try:
            command.validate(argparse.Namespace(scheduler="edf", scheduler_cls="mine.Scheduler"))
        except SystemExit as stop:
            assert "exclude each other" in str(stop)
            print("ok")
        """
    )
    assert out.strip().endswith("ok")
