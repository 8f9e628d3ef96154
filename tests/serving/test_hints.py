"""What a client may say, and the message when it is wrong."""

import pytest

from horizonserve.serving.hints import NO_HINTS, HintError, Hints, parse
from horizonserve.slo import RequestClass


def test_hints_are_picked_out_of_what_else_is_there() -> None:
    assert parse(None) is NO_HINTS
    assert parse({"top_nsigma": 2}) is NO_HINTS
    found = parse({"slo_ms": 5, "slo_class": "t2a", "priority": 10, "other": object()})
    assert found == Hints(5.0, RequestClass.T2A, 10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"slo_ms": "fast"}, "slo_ms='fast'"),
        ({"slo_ms": float("inf")}, "slo_ms=inf"),
        ({"slo_ms": -3}, "slo_ms=-3"),
        ({"slo_ms": 10**400}, "slo_ms=1000"),
        ({"slo_class": "audio"}, "slo_class='audio'.*t2a"),
        ({"priority": 1.5}, "priority=1.5"),
        ({"priority": True}, "priority=True"),
    ],
)
def test_a_malformed_hint_names_field_value_and_remedy(
    arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(HintError, match=message):
        parse(arguments)
