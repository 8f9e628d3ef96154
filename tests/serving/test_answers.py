"""First responses downstream, over the real socket."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from horizonserve.serving import answers
from horizonserve.serving.answers import Answers, Awaited

pytestmark = pytest.mark.vllm


@dataclass(eq=False)
class Request:
    request_id: str
    external_req_id: str | None = None
    num_prompt_tokens: int = 9
    num_output_tokens: int = 5

    @property
    def horizonserve_ticket(self) -> Any:
        return self.request_id  # what comes back is what was given


class Heard(Answers):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, float]] = []
        super().__init__(self._hear)

    def _hear(self, awaited: Awaited, at_s: float) -> None:
        self.heard.append((str(awaited.ticket), at_s))


@pytest.fixture
def inbox(monkeypatch: pytest.MonkeyPatch) -> Iterator[Heard]:
    monkeypatch.setenv(answers.VARIABLE, "")
    answers.prepare()
    made = Heard()
    yield made
    made.close()


def test_a_first_response_is_matched_with_its_request(inbox: Heard) -> None:
    for index in range(20):
        inbox.expect(Request(f"internal-{index}", f"r{index}"))
    for index in (3, 7):
        answers.tell(f"r{index}", 10.0 + index)
    inbox.poll()
    assert inbox.heard == [("internal-3", 13.0), ("internal-7", 17.0)]
    answers.tell("r3", 99.0)  # once only
    inbox.poll()
    assert len(inbox.heard) == 2


def test_another_process_may_tell(inbox: Heard) -> None:
    inbox.expect(Request("r"))
    code = "from horizonserve.serving.answers import tell; tell('r', 12.0)"
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))
    inbox.poll()
    assert inbox.heard == [("r", 12.0)]


def test_what_nobody_expects_is_ignored(inbox: Heard) -> None:
    inbox.expect(Request("aborted"))
    inbox.forget(Request("aborted"))
    for name in ("unknown", "aborted"):
        answers.tell(name, 12.0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        for junk in (b"", b"x", b"\xff" * 2_000):
            out.sendto(junk, f"\0{os.environ[answers.VARIABLE]}")
    inbox.poll()
    assert not inbox.heard


def test_telling_never_waits_and_never_raises(inbox: Heard) -> None:
    for _ in range(5_000):
        answers.tell("r", 1.0)
    inbox.close()
    answers.tell("r", 1.0)


def test_only_so_many_are_expected(inbox: Heard) -> None:
    for index in range(5_000):
        inbox.expect(Request(f"r{index}"))
    assert len(inbox._expected) == 4_096 and "r4999" in inbox._expected


def test_a_second_replica_goes_without(inbox: Heard) -> None:
    second = Heard()
    second.expect(Request("r"))
    answers.tell("r", 12.0)
    second.poll()
    assert not second.heard


def test_without_a_server_around_there_is_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(answers.VARIABLE, raising=False)
    made = Heard()
    answers.tell("r", 1.0)
    made.poll()
    made.close()
