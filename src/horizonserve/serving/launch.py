"""How ``--scheduler`` gets onto the command line and from there into the shared stage."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any, Final

from horizonserve import services
from horizonserve.config import ENV_CONFIG_FILE, ENV_PREFIX, SCHEDULERS, ConfigError, Settings, load
from horizonserve.services import Services, ServicesError
from horizonserve.serving import compat
from horizonserve.spatial.monitor import VARIABLE

ENV_SCHEDULER: Final = f"{ENV_PREFIX}SCHEDULER"
PLAIN_SCHEDULER: Final = "horizonserve.serving.plain.scheduler"

_HELP: Final = (
    "Scheduler of the shared stage: the stock one, earliest first-response deadline first, or"
    " HorizonServe. Defaults to HORIZON_SCHEDULER, the file HORIZON_CONFIG names, or 'default'."
)


def add_flag() -> None:
    """Make vLLM's engine arguments include ``--scheduler``, for this process's parser."""
    from vllm.engine.arg_utils import EngineArgs

    stock = EngineArgs.add_cli_args

    def add_cli_args(parser: Any) -> Any:
        parser = stock(parser)
        group = parser.add_argument_group("HorizonServe", "Latency promises on one GPU")
        group.add_argument("--scheduler", choices=SCHEDULERS, default=None, help=_HELP)
        return parser

    def remove_flag() -> None:
        # vLLM builds its parser once more, to log what differs from the defaults; the arguments
        # have lost the flag by then.
        EngineArgs.add_cli_args = stock

    EngineArgs.add_cli_args = staticmethod(add_cli_args)
    for module, command, enable in (
        ("vllm_omni.entrypoints.cli.serve", "OmniServeCommand", _enable_omni),
        ("vllm.entrypoints.cli.serve", "ServeSubcommand", _enable_plain),
    ):
        _wrap_validate(module, command, enable, remove_flag)


def _wrap_validate(
    module: str,
    command: str,
    enable: Callable[[Any, Settings], None],
    remove_flag: Callable[[], None],
) -> None:
    # The command whose parser is being built has its module loaded; the other is not wanted.
    if module not in sys.modules:
        return
    cls = getattr(sys.modules[module], command, None)
    if cls is None:
        return
    stock = cls.validate

    def validate(self: Any, args: Any) -> None:
        chosen = _take_flag(args)
        remove_flag()
        stock(self, args)
        if chosen is not None:
            # API-server and stage processes are children and read it.
            os.environ[ENV_SCHEDULER] = chosen
        if chosen == "default" or not (
            ENV_SCHEDULER in os.environ or ENV_CONFIG_FILE in os.environ
        ):
            return
        try:
            settings, _ = load()
            if settings.scheduler != "default" and settings.profile is not None:
                from horizonserve.serving import profiles

                # The shared stage would refuse it too, minutes later.
                profiles.read(settings)
        except ConfigError as error:
            sys.exit(f"horizonserve: {error}")
        os.environ[ENV_SCHEDULER] = settings.scheduler
        if settings.scheduler != "default":
            enable(args, settings)

    cls.validate = validate


def _take_flag(args: Any) -> str | None:
    """Remove ``scheduler`` from the arguments: an engine or a diffusion stage would refuse it."""
    for name in ("explicit_keys", "_cli_explicit_keys"):
        explicit = getattr(args, name, None)
        if explicit and "scheduler" in explicit:
            setattr(args, name, type(explicit)(set(explicit) - {"scheduler"}))
    chosen: str | None = vars(args).pop("scheduler", None)
    return chosen


def _enable_omni(args: Any, settings: Settings) -> None:
    if settings.lora_table is not None:
        sys.exit(
            f"horizonserve: lora_table={settings.lora_table!r}: base and LoRA layers run side by"
            " side under vllm serve only; remove it"
        )
    from horizonserve.serving import answers, front_end, hooks, pipelines

    compat.require(compat.LAUNCH)
    pipelines.install()
    front_end.install()
    _pace(settings, _services(settings), omni=True)
    answers.prepare()
    hooks.prepare(settings)


def _enable_plain(args: Any, settings: Settings) -> None:
    if args.scheduler_cls is not None:
        sys.exit(
            f"horizonserve: --scheduler-cls={args.scheduler_cls!r} and --scheduler exclude each"
            " other; remove one"
        )
    args.scheduler_cls = PLAIN_SCHEDULER
    table = _services(settings)
    adapters = {service.adapter or name for name, service in table.services.items()}
    if getattr(args, "enable_lora", False) and len(adapters) > args.max_loras:
        sys.exit(
            f"horizonserve: services={settings.services!r}: {len(adapters)} services have an"
            f" adapter each, but --max-loras={args.max_loras}; give --max-loras {len(adapters)}"
        )
    _pace(settings, table, omni=False)
    if settings.lora_table is not None:
        from horizonserve.serving import lora_overlap

        lora_overlap.prepare(args, settings)


def _services(settings: Settings) -> Services:
    try:
        return services.load(settings.services) if settings.services else Services()
    except ServicesError as error:
        sys.exit(f"horizonserve: services={settings.services!r}: {error}")


def _pace(settings: Settings, table: Services, omni: bool) -> None:
    if settings.serves_services:
        from horizonserve.serving import pacing

        (pacing.install_omni if omni else pacing.install)(settings, table)


def enable_in_child() -> None:
    """Do in another process of a server what the command line did in its first.

    Also where vLLM-Omni is used as a library, with ``HORIZON_SCHEDULER`` set. Only modules that
    are loaded anyway are changed: a stage process must not load the front end.
    """
    if os.environ.get(ENV_SCHEDULER, "default") == "default":
        return
    command_line = {"vllm_omni.entrypoints.cli.serve", "vllm.entrypoints.cli.serve"}
    if multiprocessing.parent_process() is None and command_line & sys.modules.keys():
        return  # its flag may yet say default; ``validate`` decides
    from horizonserve.serving import answers, front_end, hooks, lora_overlap, pipelines

    if "vllm_omni.config.pipeline_registry" in sys.modules:
        pipelines.install()
        if multiprocessing.parent_process() is None and VARIABLE not in os.environ:
            hooks.prepare(load()[0])
            answers.prepare()
    hooks.install()
    lora_overlap.install()
    if "vllm_omni.entrypoints.openai.serving_chat" in sys.modules:
        front_end.install()
        settings, _ = load()
        _pace(settings, _services(settings), omni=True)
    elif "vllm.v1.engine.async_llm" in sys.modules and not os.environ.get(VARIABLE):
        settings, _ = load()
        _pace(settings, _services(settings), omni=False)
