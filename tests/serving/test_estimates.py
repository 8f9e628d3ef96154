"""Estimates in the scheduler: what it begins with, and what it learns from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from engine import answer, make_request, step
from vllm.v1.request import RequestStatus

from horizonserve import facts
from horizonserve.config import ConfigError
from horizonserve.serving import answers, profiles
from horizonserve.serving.admission import COARSE
from horizonserve.serving.schedulers import HorizonARAsyncScheduler, HorizonARScheduler
from horizonserve.slo import RequestClass

pytestmark = pytest.mark.vllm
Make = Callable[..., Any]

T2T, T2A = RequestClass.T2T, RequestClass.T2A
SIZE = {
    "prompt_words": 1,
    "answer_tokens": 16,
    "samples": 6,
    "first_p95_ms": 9e9,
    "shared_ms": 1.0,
    "downstream_ms": 0.0,
}


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Write a profile of this machine and let servers run by it; returns its path."""

    def write(**changes: Any) -> Path:
        sizes = [
            {**SIZE, "prompt_tokens": 10, "first_p50_ms": 100.0},
            {**SIZE, "prompt_tokens": 1_000, "first_p50_ms": 1_090.0},
        ]
        t2t = {
            "samples": 12,
            "solo_p50_ms": 500.0,
            "solo_p95_ms": 1_000.0,
            "solo_p95_low_ms": 1_000.0,
            "solo_p95_high_ms": 1_000.0,
            "slo_ms": 4_000.0,
            "per_answer_token_ms": 0.0,
            "sizes": sizes,
        }
        plain = {
            "schema_version": 1,
            "kind": "measured on CPU engine",
            "platform": facts.platform().model_dump(),
            "model": {"name": "tiny", "architecture": "LlamaForCausalLM", "hidden_size": 64},
            "versions": facts.versions().model_dump(exclude_none=True),
            "date": "2026-11-30",
            "seed": 1,
            "slo_multiple": 4.0,
            "classes": {"t2t": t2t},
            "total_samples": 12,
        }
        path = tmp_path / "profile.yaml"
        path.write_text(yaml.safe_dump(plain | changes))
        monkeypatch.setenv("HORIZON_PROFILE", str(path))
        return path

    return write


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server around the schedulers, whose front end tells of answers."""
    monkeypatch.setenv(answers.VARIABLE, "")
    answers.prepare()


def admitted(scheduler: Any, name: str, **fields: Any) -> Any:
    scheduler.add_request(make_request(name, **fields))
    return scheduler.requests[name].horizonserve_ticket


def close(estimate_s: float, expected_s: float) -> bool:
    """Estimates are rounded to powers of COARSE."""
    return COARSE**-0.51 <= estimate_s / expected_s <= COARSE**0.51


def test_a_profile_gives_targets_and_estimates_by_size(
    make: Make, profile: Callable[..., Path]
) -> None:
    profile()
    scheduler = make(HorizonARScheduler)
    short = admitted(scheduler, "s1", prompt_tokens=10)
    large = admitted(scheduler, "s2", prompt_tokens=505)
    assert close(short.estimate_s, 0.1) and close(large.estimate_s, 0.595)
    assert short.deadline_s - short.arrival_s == pytest.approx(4.0)  # the profile's multiple
    long = admitted(scheduler, "l1")  # a class that the profile has not
    assert close(long.estimate_s, 2.5) and long.deadline_s - long.arrival_s == 10.0


def test_settings_win_over_the_profile(make: Make, profile: Callable[..., Path]) -> None:
    profile()
    settings = {"slo_text_ms": 700, "estimate_ms": {"t2t": 300}}
    ticket = admitted(make(HorizonARScheduler, settings), "s1")
    assert close(ticket.estimate_s, 0.3)
    assert ticket.deadline_s - ticket.arrival_s == pytest.approx(0.7)


def test_constants_are_the_classes(make: Make, profile: Callable[..., Path]) -> None:
    profile()
    scheduler = make(HorizonARScheduler, {"estimates": "constant"})
    estimates_s = {admitted(scheduler, f"s{n}", prompt_tokens=n).estimate_s for n in (10, 900)}
    assert len(estimates_s) == 1 and close(estimates_s.pop(), 1.0)


@pytest.mark.parametrize(
    ("changes", "differs"),
    [
        ({"platform": {"device": "Another", "units": 1}}, "platform.device"),
        ({"model": {"name": "x", "architecture": "OtherArch"}}, "model.architecture"),
        ({"versions": {"horizonserve": "0.1", "vllm": "0.31.0"}}, "versions.vllm"),
        ({"kind": "from the paper, not measured here"}, "publication"),
    ],
)
def test_another_ones_profile_is_refused_or_used_with_a_warning(
    make: Make,
    profile: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    differs: str,
) -> None:
    path = profile(**changes)
    with pytest.raises(ConfigError, match=differs) as caught:
        make(HorizonARScheduler)
    assert str(path) in str(caught.value) and "profile_mismatch=warn" in str(caught.value)
    warnings: list[str] = []
    monkeypatch.setattr(profiles.logger, "warning", lambda text, what: warnings.append(what))
    monkeypatch.setenv("HORIZON_PROFILE_MISMATCH", "warn")
    assert close(admitted(make(HorizonARScheduler), "s1", prompt_tokens=10).estimate_s, 0.1)
    assert differs in warnings[0]


@pytest.mark.parametrize("cls", [HorizonARScheduler, HorizonARAsyncScheduler])
def test_it_learns_from_first_tokens(make: Make, cls: type) -> None:
    scheduler = make(cls)
    for index in range(40):
        name = f"s{index}"
        scheduler.add_request(make_request(name, prompt_tokens=20, output_tokens=2))
        output = scheduler.schedule()
        scheduler.now_s[0] += 0.4
        answer(scheduler, output)
        while name in scheduler.requests:
            step(scheduler)
    assert scheduler._estimator.answers(T2T) == 40
    assert close(admitted(scheduler, "s", prompt_tokens=20).estimate_s, 0.4)


def test_it_learns_of_long_requests_from_the_front_end(make: Make, told: None) -> None:
    scheduler = make(HorizonARScheduler)
    for index in range(30):
        name = f"l{index}"
        scheduler.add_request(make_request(name, prompt_tokens=20, output_tokens=3))
        while name in scheduler.requests:
            scheduler.now_s[0] += 0.1
            step(scheduler)
        answers.tell(name, scheduler.now_s[0] + 3.0)
        step(scheduler)
        scheduler._answers.poll()
    assert scheduler._estimator.answers(T2A) == 30
    ticket = admitted(scheduler, "l", prompt_tokens=20, output_tokens=3)
    assert ticket.estimate_s == pytest.approx(3.3, rel=0.2)


def test_what_is_aborted_or_claims_a_class_of_another_path_teaches_nothing(
    make: Make, told: None
) -> None:
    scheduler = make(HorizonARScheduler)
    scheduler.add_request(make_request("l1"))
    step(scheduler)
    scheduler.finish_requests("l1", RequestStatus.FINISHED_ABORTED)
    answers.tell("l1", scheduler.now_s[0] + 1.0)
    scheduler.add_request(make_request("s1", extra_args={"slo_class": "t2a"}))
    for _ in range(8):
        scheduler.now_s[0] += 0.1
        step(scheduler)
    scheduler._answers.poll()
    assert not any(scheduler._estimator.answers(name) for name in RequestClass)
