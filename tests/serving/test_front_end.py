"""The patches of the front end, on stand-ins with vLLM-Omni's signatures and on its own classes."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams

from horizonserve.serving import front_end
from horizonserve.serving.hints import HintError

pytestmark = pytest.mark.vllm


class Engine:
    """Takes what ``AsyncOmni.generate`` takes and says what it was given."""

    default_sampling_params_list = (SamplingParams(seed=1), SamplingParams(seed=2))

    def generate(
        self,
        prompt: Any,
        sampling_params: Any = None,
        request_id: str = "",
        *,
        sampling_params_list: Any = None,
        priority: int = 0,
        **kwargs: Any,
    ) -> Any:
        return SimpleNamespace(**locals())


@pytest.fixture
def engine() -> Engine:
    cls = type("Patched", (Engine,), {"generate": Engine.generate})
    front_end._patch_generate(cls)
    made: Engine = cls()
    return made


def test_the_patch_has_the_parameters_of_what_it_replaces() -> None:
    from vllm_omni.entrypoints.async_omni import AsyncOmni

    ours = list(inspect.signature(Engine.generate).parameters)[:4]
    assert list(inspect.signature(AsyncOmni.generate).parameters)[:4] == ours


def test_priority_reaches_the_shared_stage_on_a_copy(engine: Engine) -> None:
    params = SamplingParams(extra_args={"other": 1})
    given = engine.generate("p", params, "id", priority=20)
    assert given.sampling_params.extra_args == {"other": 1, "priority": 20}
    assert (given.prompt, given.request_id, given.priority) == ("p", "id", 20)
    assert params.extra_args == {"other": 1}, "the caller's own are not touched"
    many = [SamplingParams(), SamplingParams()]
    given = engine.generate("p", sampling_params_list=many, priority=10)
    assert [p.extra_args for p in given.sampling_params_list] == [{"priority": 10}, None]
    assert many[0].extra_args is None
    given = engine.generate("p", sampling_params_list=params, priority=10)
    assert given.sampling_params_list.extra_args["priority"] == 10
    given = engine.generate("p", priority=10)
    assert [p.seed for p in given.sampling_params_list] == [1, 2]
    assert Engine.default_sampling_params_list[0].extra_args is None


def test_without_hints_everything_passes_as_it_is(engine: Engine) -> None:
    params = SamplingParams()
    given = engine.generate("p", params, lora_request="l")
    assert given.sampling_params is params
    assert given.kwargs == {"lora_request": "l"}
    assert engine.generate("p").sampling_params_list is None


def test_a_malformed_hint_is_refused_before_generation_starts(engine: Engine) -> None:
    bad = SamplingParams(extra_args={"slo_ms": -5})
    for call in (
        lambda: engine.generate("p", bad),
        lambda: engine.generate("p", sampling_params_list=[bad, SamplingParams()]),
        lambda: engine.generate("p", sampling_params=bad),
    ):
        with pytest.raises(HintError, match="slo_ms=-5"):
            call()


def test_hints_of_a_chat_body() -> None:
    body = SimpleNamespace(
        vllm_xargs={"slo_ms": 5, "other": 1}, model_fields_set={"priority"}, priority=10
    )
    assert front_end.body_hints(body) == {"slo_ms": 5, "priority": 10}
    body = SimpleNamespace(vllm_xargs=None, model_fields_set=set(), priority=0)
    assert front_end.body_hints(body) == {}


def test_what_the_client_wrote_for_the_stage_itself_stands() -> None:
    class Chat:
        @staticmethod
        def _apply_text_chat_ar_task_mode(params: Any, request: Any) -> None:
            params[0].extra_args = {"slo_ms": 7}

    front_end._patch_chat(Chat)
    params = [SamplingParams(), SamplingParams()]
    body = SimpleNamespace(vllm_xargs={"slo_ms": 5, "slo_class": "t2t"}, model_fields_set=set())
    Chat._apply_text_chat_ar_task_mode(params, body)
    assert params[0].extra_args == {"slo_ms": 7, "slo_class": "t2t"}
    assert params[1].extra_args is None
