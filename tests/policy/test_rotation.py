"""N:M rotation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horizonserve.policy.rotation import N_MAX, M, Rotation
from horizonserve.slo import Path


def phases(rotation: Rotation, shares: list[float]) -> str:
    letters = []
    for share in shares:
        letters.append("S" if rotation.phase(share) is Path.SHORT else "L")
        rotation.advance()
    return "".join(letters)


@pytest.mark.parametrize(
    ("share", "cycle"),
    [(0.0, "SSLL"), (0.25, "SSSSLL"), (0.5, "SSSSSLL"), (1.0, "SSSSSSSSLL")],
)
def test_a_cycle_has_n_short_and_m_long_steps(share: float, cycle: str) -> None:
    assert phases(Rotation(), [share] * 2 * len(cycle)) == cycle * 2


def test_n_is_latched_when_a_cycle_starts() -> None:
    # Pressure rises in the second step: this cycle stays 2:2, the next is 8:2.
    assert phases(Rotation(), [0.0, 1.0, 1.0, 1.0, 1.0]) == "SSLLS"
    assert phases(Rotation(), [0.0] + [1.0] * 13) == "SSLLSSSSSSSSLL"


def test_asking_for_the_phase_does_not_count_a_step() -> None:
    rotation = Rotation()
    assert {rotation.phase(0.0) for _ in range(9)} == {Path.SHORT}


@given(st.lists(st.floats(0, 1), min_size=N_MAX + M, max_size=400))
def test_long_gets_a_fifth_of_the_contested_steps(shares: list[float]) -> None:
    """In every window of N_MAX + M contested steps, however the pressure moves."""
    letters = phases(Rotation(), shares)
    window = N_MAX + M
    # A window that starts inside a long phase may see one cycle's tail and the next one's head.
    for start in range(len(letters) - 2 * window + 1):
        assert letters[start : start + 2 * window].count("L") >= 2 * M - M
    cycles = len(letters) // window
    assert letters.count("L") >= M * cycles
