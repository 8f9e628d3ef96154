"""The door: vLLM calls ``register`` in every process that it starts.

Until a scheduler is chosen it adds a command-line flag and changes nothing else. It is chosen by
``--scheduler``, ``HORIZON_SCHEDULER`` or the file ``HORIZON_CONFIG``; where vLLM-Omni is used as a
library, by ``HORIZON_SCHEDULER`` alone.
"""

from __future__ import annotations

import sys

_registered = False


def register() -> None:
    """Entry point of ``vllm.general_plugins``; cheap, and safe to call again."""
    global _registered
    if _registered:
        return
    _registered = True
    from horizonserve.serving import launch

    launch.enable_in_child()
    # Only a process that builds a command line has this module before it loads plugins.
    if "vllm.engine.arg_utils" in sys.modules:
        launch.add_flag()
