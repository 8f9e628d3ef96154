"""The earliest-deadline baseline hides nothing and looks at nothing but deadlines."""

from horizonserve.policy.edf import earliest_deadline_first
from horizonserve.policy.slack import Ticket
from horizonserve.policy.waiting import Waiting
from horizonserve.slo import RequestClass


def test_order_is_by_deadline_whatever_the_class() -> None:
    spec = [("a", "t2a", 9.0), ("b", "t2t", 3.0), ("c", "t2i", 1.0), ("d", "t2t", 4.0)]
    made = [
        Ticket(name, RequestClass(c), RequestClass(c).path, 0.0, deadline_s, 1.0)
        for name, c, deadline_s in spec
    ]
    order = earliest_deadline_first(Waiting(made), 10)
    assert [t.group for t in order] == ["c", "b", "d", "a"]
    assert [t.group for t in earliest_deadline_first(Waiting(made), 2)] == ["c", "b"]
