"""Three patches of vLLM-Omni's front end: the shared stage gets hints, and news of answers.

vLLM-Omni 0.30 copies eleven sampling fields from a chat body and drops ``priority`` and
``vllm_xargs``. The stage reads hints from ``extra_args`` (hints.py), so they are put there.
When the first output of a request's final stage is handed to its client, the shared stage is told
(answers.py).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any

from horizonserve.serving import answers, compat
from horizonserve.serving.hints import KEYS, parse
from horizonserve.spatial.monitor import SHARED_STAGE


def install() -> None:
    """Patch this process's API server classes; safe to call again.

    Raises:
        CompatError: a name that the patches need is gone.
    """
    compat.require(compat.FRONT_END)
    from vllm_omni.entrypoints.async_omni import AsyncOmni
    from vllm_omni.entrypoints.openai.serving_chat import OmniOpenAIServingChat

    if getattr(AsyncOmni.generate, "horizonserve", False):
        return
    _patch_chat(OmniOpenAIServingChat)
    _patch_generate(AsyncOmni)
    _patch_results(AsyncOmni)


def _patch_chat(chat: Any) -> None:
    # The one method that sees both the body and the stages' parameters, however these were given.
    stock = chat._apply_text_chat_ar_task_mode

    def apply_text_chat_ar_task_mode(sampling_params_list: list[Any], request: Any) -> None:
        stock(sampling_params_list, request)
        _add_hints(sampling_params_list, body_hints(request))

    chat._apply_text_chat_ar_task_mode = staticmethod(apply_text_chat_ar_task_mode)


def _patch_generate(engine: Any) -> None:
    stock = engine.generate

    def generate(
        self: Any,
        prompt: Any,
        sampling_params: Any = None,
        request_id: str = "",
        *,
        sampling_params_list: Any = None,
        priority: int = 0,
        **kwargs: Any,
    ) -> Any:
        if priority:
            # On copies: a caller may use the same parameters for its next request.
            if sampling_params_list is not None:
                sampling_params_list = _with_priority(sampling_params_list, priority)
            elif sampling_params is not None:
                sampling_params = _with_priority(sampling_params, priority)
            else:
                sampling_params_list = _with_priority(self.default_sampling_params_list, priority)
        given = sampling_params if sampling_params_list is None else sampling_params_list
        # A ValueError here, before generation starts, is a 400 with this message.
        parse(getattr(_of_shared_stage(given), "extra_args", None))
        return stock(
            self,
            prompt,
            sampling_params,
            request_id,
            sampling_params_list=sampling_params_list,
            priority=priority,
            **kwargs,
        )

    generate.horizonserve = True  # type: ignore[attr-defined]
    engine.generate = generate


def _patch_results(engine: Any) -> None:
    stock = engine._process_orchestrator_results

    async def process_orchestrator_results(
        self: Any, request_id: str, metrics: Any, final_stage: int, *args: Any
    ) -> Any:
        told = final_stage == SHARED_STAGE  # it knows of its own
        async with aclosing(stock(self, request_id, metrics, final_stage, *args)) as outputs:
            async for output in outputs:
                if not told and output.stage_id == final_stage:
                    told = True
                    answers.tell(request_id, time.monotonic())
                yield output

    engine._process_orchestrator_results = process_orchestrator_results


def body_hints(request: Any) -> dict[str, Any]:
    """The hints in a chat body: those keys of ``vllm_xargs`` that are ours, and ``priority``."""
    arguments = request.vllm_xargs or {}
    hints = {key: arguments[key] for key in KEYS if key in arguments}
    if "priority" in request.model_fields_set:
        hints.setdefault("priority", request.priority)
    return hints


def _of_shared_stage(params: Any) -> Any:
    return params[0] if isinstance(params, Sequence) else params


def _with_priority(params: Any, priority: int) -> Any:
    first = copy.copy(_of_shared_stage(params))
    many = [first, *params[1:]] if isinstance(params, Sequence) else first
    _add_hints([first], {"priority": priority})
    return many


def _add_hints(params: list[Any], hints: Mapping[str, Any]) -> None:
    # Only the shared stage reads them; what the client wrote there itself stands.
    if hints and hasattr(params[0], "extra_args"):
        params[0].extra_args = {**hints, **(params[0].extra_args or {})}
