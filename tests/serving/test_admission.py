"""Class, path and deadline of real requests."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from engine import make_request
from vllm_omni.engine.serialization import serialize_additional_information

from horizonserve.config import Settings
from horizonserve.policy.estimate import Estimator
from horizonserve.serving.admission import Admission, estimates_s
from horizonserve.serving.schedulers import route
from horizonserve.slo import Output, Path

pytestmark = pytest.mark.vllm

SETTINGS = Settings().changed(
    {"slo_text_ms": 1000, "slo_audio_ms": 10_000, "slo_image_ms": 60_000, "slo_i2t_ms": 2500}
)
NOW_S = 500.0


def admit(request: Any, outputs: dict[int, Output] | None = None, **present: Any) -> Any:
    outputs = {0: Output.TEXT, 2: Output.AUDIO} if outputs is None else outputs
    estimator = Estimator(estimates_s(SETTINGS))
    admission = Admission(SETTINGS, outputs, route, estimator, lambda: NOW_S)
    return admission.admit(request, present)


def with_inputs(request: Any, *modalities: str) -> Any:
    request.mm_features = [SimpleNamespace(modality=modality) for modality in modalities]
    return request


@pytest.mark.parametrize(
    ("request_", "outputs", "expected", "path"),
    [
        (make_request("s"), None, "t2t", Path.SHORT),
        (make_request("l"), None, "t2a", Path.LONG),
        (make_request("l"), {1: Output.IMAGE}, "t2i", Path.LONG),
        (make_request("l"), {}, "t2a", Path.LONG),
        (with_inputs(make_request("s"), "image"), None, "i2t", Path.SHORT),
        (with_inputs(make_request("l"), "video", "audio"), None, "v2a", Path.LONG),
        (make_request("l", priority=20), None, "t2i", Path.LONG),
        (make_request("s", priority=10), None, "t2a", Path.SHORT),
        (make_request("s", priority=7), None, "t2t", Path.SHORT),
        (make_request("l", extra_args={"priority": 0}), None, "t2t", Path.LONG),
        (make_request("l", extra_args={"slo_class": "v2a"}), None, "v2a", Path.LONG),
        (make_request("s", extra_args={"slo_class": "i2t", "priority": 20}), None, "i2t", "short"),
        (make_request("c__cfg", final_stage=0, companion=True), None, "t2a", Path.LONG),
        (make_request("c__cfg", final_stage=0, companion=True), {1: Output.IMAGE}, "t2i", "long"),
    ],
)
def test_class_and_path(request_: Any, outputs: Any, expected: str, path: str) -> None:
    ticket = admit(request_, outputs)
    assert (ticket.request_class, ticket.path) == (expected, path)


def test_the_payload_is_read_as_it_comes_over_the_wire() -> None:
    def path_of(**info: Any) -> Path:
        request = make_request("s")
        request.additional_information = serialize_additional_information(info)
        return admit(request).path

    assert path_of(omni_final_stage_id=2) is Path.LONG
    assert path_of(omni_final_stage_id=0) is Path.SHORT
    assert path_of(omni_final_stage_id=0, omni_force_kv_transfer=True) is Path.LONG
    assert path_of(global_request_id=["chatcmpl-1"]) is Path.SHORT
    assert path_of(omni_final_stage_id=0, omni_force_kv_transfer=False) is Path.SHORT


def test_deadline_counts_from_arrival_with_the_time_in_the_front_end() -> None:
    request = make_request("s", arrival_time=time.time() - 0.25)
    assert admit(request).deadline_s == pytest.approx(NOW_S + 0.75, abs=0.05)


@pytest.mark.parametrize("arrival_s", [0.0, 1.0, time.time() + 3600, time.time() - 3600])
def test_an_absurd_arrival_time_is_ignored(arrival_s: float) -> None:
    ticket = admit(make_request("s", arrival_time=arrival_s))
    assert (ticket.arrival_s, ticket.deadline_s) == (NOW_S, NOW_S + 1)


def test_a_request_may_name_its_own_slo() -> None:
    ticket = admit(make_request("s", extra_args={"slo_ms": 300}))
    assert ticket.deadline_s == pytest.approx(NOW_S + 0.3)
    # It is not lost on arrival because the class as a whole needs longer.
    assert ticket.slack_ratio(NOW_S) == pytest.approx(SETTINGS.slo_multiple)
    longer = admit(make_request("s", extra_args={"slo_ms": 9000}))
    assert longer.estimate_s == pytest.approx(0.2, rel=0.05)


BAD: list[dict[str, Any]] = [
    {"slo_ms": "soon"},
    {"slo_ms": 0},
    {"slo_ms": float("nan")},
    {"slo_ms": True},
    {"slo_ms": [5]},
    {"slo_class": "x2y"},
    {"slo_class": 7},
    {"priority": "high"},
    {"priority": None, "slo_ms": -1},
]


@pytest.mark.parametrize("arguments", BAD)
def test_a_malformed_hint_costs_nothing_but_a_warning(
    arguments: dict[str, Any], vllm_log: pytest.LogCaptureFixture
) -> None:
    ticket = admit(make_request("s", extra_args=arguments))
    assert (ticket.request_class, ticket.deadline_s) == ("t2t", NOW_S + 1)
    assert vllm_log.text.count("ignored hint") == 1


def test_extra_arguments_of_others_are_no_hints() -> None:
    assert admit(make_request("s", extra_args={"ar_task_mode": "comprehension"})).deadline_s


def test_a_forwarded_priority_reaches_the_request() -> None:
    request = make_request("s", extra_args={"priority": 10})
    assert admit(request).request_class == "t2a"
    assert request.priority == 10


def test_a_companion_takes_the_ticket_of_the_longest_parent() -> None:
    near, far = make_request("l1-ab"), make_request("l1")
    for parent in (near, far):
        admit(parent)
    companion = make_request("l1-ab__cfg_text", final_stage=0, companion=True)
    present = {"l1": far, "l1-ab": near, "s": make_request("s")}
    assert admit(companion, **present) is near.horizonserve_ticket
