"""The stand-in for memory pressure on a CPU: of this machine's /proc, and of made ones."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from horizonserve.spatial.cpu_proxy import SAMPLE_S, CpuProxy
from horizonserve.spatial.pressure import Sampler, SourceError


class Machine:
    """A root with the files that a test writes, and a clock that it moves."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.now_s = 10.0
        self.proxy = CpuProxy(root, lambda: self.now_s)

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def stalled(self, name: str, total_s: float) -> None:
        line = f"avg10=0.00 avg60=0.00 avg300=0.00 total={round(total_s * 1e6)}"
        self.write(name, f"some {line}\nfull {line.replace('total=', 'total=9')}\n")

    def running(self, tasks: int) -> None:
        self.write("proc/stat", f"cpu  1 2 3\nctxt 5\nprocs_running {tasks}\nprocs_blocked 0\n")

    def values(self, pass_s: float = 0.0) -> list[float]:
        self.now_s += pass_s
        return [round(sample.value, 6) for sample in self.proxy.sample()]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


MACHINE, CONTAINER = "proc/pressure/cpu", "sys/fs/cgroup/cpu.pressure"


@pytest.mark.parametrize("name", [MACHINE, CONTAINER])
def test_the_share_of_time_in_which_work_waited(machine: Machine, name: str) -> None:
    machine.stalled(name, 50.0)
    assert machine.values() == []
    machine.stalled(name, 50.1)
    assert machine.values(0.1) == []  # not a sample's time yet
    assert machine.values(0.1) == [0.5]
    assert machine.values() == []
    assert machine.values(1.0) == [0.0]
    machine.stalled(name, 51.1)
    assert machine.values(1.0) == [1.0]


def test_the_containers_own_figure_goes_first(machine: Machine) -> None:
    machine.stalled(MACHINE, 0)
    machine.stalled(CONTAINER, 0)
    machine.values()
    machine.stalled(MACHINE, 0.9)
    machine.stalled(CONTAINER, 0.2)
    assert machine.values(1.0) == [0.2]


def test_a_figure_that_cannot_be_read_is_passed_over(machine: Machine) -> None:
    machine.write(CONTAINER, "")  # pressure accounting is off for this cgroup
    machine.stalled(MACHINE, 0)
    machine.values()
    machine.stalled(MACHINE, 0.3)
    assert machine.values(1.0) == [0.3]


def test_clocks_that_differ_a_little_stay_in_range(machine: Machine) -> None:
    machine.stalled(MACHINE, 5)
    machine.values()
    machine.stalled(MACHINE, 6.01)
    assert machine.values(1.0) == [1.0]
    machine.stalled(MACHINE, 6.0)
    assert machine.values(1.0) == [0.0]


def test_without_stall_figures_the_runnable_tasks_count(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    machine.running(1)
    machine.values()
    # The reader is one of the running; of the others, two have a core.
    for running, share in ((1, 0), (3, 0), (4, 1 / 3), (5, 0.5), (21, 0.9)):
        machine.running(running)
        assert machine.values(0.2) == [round(share, 6)]
    assert machine.values() == []


def test_a_machine_that_tells_nothing_has_no_figure(machine: Machine) -> None:
    with pytest.raises(SourceError, match="proc/stat"):
        machine.proxy.sample()
    machine.write("proc/stat", "cpu 1 2 3\n")
    with pytest.raises(SourceError, match="procs_running"):
        machine.proxy.sample()
    machine.running(2)  # it is tried anew
    machine.proxy.sample()


def test_a_figure_that_vanishes_is_an_outage_and_heals(machine: Machine) -> None:
    sampler = Sampler(machine.proxy, clock=lambda: machine.now_s)
    seen = []
    for step in range(40):
        machine.stalled(MACHINE, 0.2 * machine.now_s)
        if 10 <= step < 12:
            (machine.root / MACHINE).unlink()
        machine.now_s += max(sampler.look(), 0.2)
        seen.append(sampler.pressure(machine.now_s))
    assert seen[5] == pytest.approx(0.2)
    assert seen[10] is None and seen[11] is None
    assert seen[-1] == pytest.approx(0.2)


def test_it_is_called_a_proxy(machine: Machine) -> None:
    assert "proxy" in machine.proxy.name
    assert "not memory bandwidth" in machine.proxy.name


def test_this_machine_has_a_figure() -> None:
    """Whatever it runs on, a container without stall figures included."""
    proxy = CpuProxy()
    proxy.sample()
    time.sleep(SAMPLE_S + 0.05)
    (sample,) = proxy.sample()
    assert 0 <= sample.value <= 1
    proxy.close()
    assert proxy.sample() == []
