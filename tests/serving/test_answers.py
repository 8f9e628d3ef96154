"""First responses downstream, over the real socket."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from horizonserve.policy.estimate import Estimator
from horizonserve.serving import answers
from horizonserve.serving.answers import Answers
from horizonserve.slo import RequestClass

pytestmark = pytest.mark.vllm
T2A = RequestClass.T2A


@pytest.fixture
def estimator(monkeypatch: pytest.MonkeyPatch) -> Estimator:
    monkeypatch.setenv(answers.VARIABLE, "")
    answers.prepare()
    return Estimator(dict.fromkeys(RequestClass, 1.0))


@pytest.fixture
def inbox(estimator: Estimator) -> Iterator[Answers]:
    made = Answers(estimator.observe)
    yield made
    made.close()


def test_a_first_response_teaches_the_estimator(estimator: Estimator, inbox: Answers) -> None:
    for index in range(20):
        inbox.await_(f"r{index}", T2A, 100, 50, 10.0)
        answers.tell(f"r{index}", 13.5)
        inbox.poll()
    assert estimator.answers(T2A) == 20
    assert estimator.estimate_s(T2A, 100, 50) == pytest.approx(3.5, rel=0.05)


def test_another_process_may_tell(estimator: Estimator, inbox: Answers) -> None:
    inbox.await_("r", T2A, 100, 50, 10.0)
    code = "from horizonserve.serving.answers import tell; tell('r', 12.0)"
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))
    inbox.poll()
    assert estimator.answers(T2A) == 1


def test_what_nobody_awaits_is_ignored(estimator: Estimator, inbox: Answers) -> None:
    answers.tell("unknown", 12.0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        for junk in (b"", b"x", b"\xff" * 2_000):
            out.sendto(junk, f"\0{os.environ[answers.VARIABLE]}")
    inbox.poll()
    assert estimator.answers(T2A) == 0


def test_telling_never_waits_and_never_raises(inbox: Answers) -> None:
    for _ in range(5_000):
        answers.tell("r", 1.0)
    inbox.close()
    answers.tell("r", 1.0)


def test_only_so_many_are_awaited(inbox: Answers) -> None:
    for index in range(5_000):
        inbox.await_(f"r{index}", T2A, 100, 50, 10.0)
    assert len(inbox._awaited) == 4_096 and "r4999" in inbox._awaited


def test_a_second_replica_goes_without(estimator: Estimator, inbox: Answers) -> None:
    second = Answers(estimator.observe)
    second.await_("r", T2A, 100, 50, 10.0)
    answers.tell("r", 12.0)
    second.poll()
    assert estimator.answers(T2A) == 0


def test_without_a_server_around_there_is_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(answers.VARIABLE, raising=False)
    made = Answers(Estimator(dict.fromkeys(RequestClass, 1.0)).observe)
    answers.tell("r", 1.0)
    made.poll()
    made.close()
