"""The view of a step, as tables: step -> waiting, visible, hidden.

Groups are written as a letter and an id: s1 is short, l1 is long. Unless said otherwise a short
group has 10 s to its deadline and needs 1 s, a long one 100 s and 10 s, so both are ordinary
under the guard of 4.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from horizonserve.policy.rotation import N_MAX, M
from horizonserve.policy.slack import Ticket
from horizonserve.policy.view import LOST_SHARE, Rules, TemporalPolicy, View
from horizonserve.policy.waiting import Waiting
from horizonserve.slo import Path, RequestClass


def group(name: str, deadline_s: float | None = None) -> Ticket:
    short = name[0] == "s"
    request_class = RequestClass.T2T if short else RequestClass.T2A
    # Ids break ties: s1 is due just before s2.
    default_s = (10.0 if short else 100.0) + int(name[1:]) * 1e-3
    return Ticket(
        name,
        request_class,
        request_class.path,
        0.0,
        default_s if deadline_s is None else deadline_s,
        1.0 if short else 10.0,
    )


def look(
    policy: TemporalPolicy, names: str | list[Ticket], now_s: float = 0.0, **kwargs: Any
) -> View:
    tickets = [group(n) for n in names.split()] if isinstance(names, str) else names
    kwargs = {"limit": 100, "long_in_stage": 0, "busy": True} | kwargs
    return policy.view(Waiting(tickets), now_s, **kwargs)


def names(view: View) -> str:
    return " ".join(ticket.group for ticket in view.order)


def test_rotation_shows_one_path_at_a_time_while_both_wait() -> None:
    policy = TemporalPolicy(Rules(long_cap=None))
    table = [
        # waiting, visible
        ("s1 s2 l1 l2", "s1 s2"),
        ("s1 s2 l1 l2", "s1 s2"),
        ("s1 s2 l1 l2", "l1 l2"),
        ("s1 s2 l1 l2", "l1 l2"),
        ("s1 s2 l1 l2", "s1 s2"),
        # Not contested: the other path is not kept waiting for nobody, and no step is counted.
        ("l1 l2", "l1 l2"),
        ("s1 s2", "s1 s2"),
        ("s1 s2 l1 l2", "s1 s2"),
        ("s1 s2 l1 l2", "l1 l2"),
    ]
    for step, (waiting, visible) in enumerate(table):
        view = look(policy, waiting)
        assert names(view) == visible, f"step {step}"
        assert view.hidden == len(waiting.split()) - len(visible.split()), f"step {step}"


def test_rotation_off_shows_both_paths() -> None:
    policy = TemporalPolicy(Rules(rotation=False, long_cap=None))
    assert [names(look(policy, "l1 s1 l2 s2")) for _ in range(5)] == ["s1 s2 l1 l2"] * 5


def test_protected_groups_pass_every_phase_and_the_cap() -> None:
    policy = TemporalPolicy(Rules(long_cap=1))
    urgent = group("l9", 35.0)  # u = 3.5 < 4
    waiting = [group("s1"), group("l1"), urgent]
    for _ in range(4):
        view = look(policy, waiting, long_in_stage=1)
        assert names(view) == "s1 l9"
        assert view.protected == 1


def test_protection_keeps_visible_and_the_deadline_orders() -> None:
    policy = TemporalPolicy(Rules(rotation=False, long_cap=None))
    # l9 is protected and s1 is not, but s1 is due first.
    assert names(look(policy, [group("l9", 35.0), group("s1"), group("s2", 1.5)])) == "s2 s1 l9"


def test_without_the_guard_nobody_is_protected() -> None:
    policy = TemporalPolicy(Rules(slack_guard=False))
    view = look(policy, [group("s1"), group("l9", 15.0)])
    assert names(view) == "s1"
    assert view.protected == 0


def test_the_cap_counts_what_is_in_the_stage_and_takes_the_earliest_deadlines() -> None:
    policy = TemporalPolicy(Rules(rotation=False, long_cap=2))
    waiting = [group("l3"), group("l1"), group("l2"), group("s1")]
    assert names(look(policy, waiting)) == "s1 l1 l2"
    assert names(look(policy, waiting, long_in_stage=1)) == "s1 l1"
    assert names(look(policy, waiting, long_in_stage=2)) == "s1"
    assert names(look(policy, waiting, long_in_stage=7)) == "s1"


def test_a_full_cap_does_not_waste_the_long_phase() -> None:
    policy = TemporalPolicy(Rules(long_cap=1))
    assert [names(look(policy, "s1 l1", long_in_stage=1)) for _ in range(6)] == ["s1"] * 6


def test_the_cap_keeps_slots_only_while_short_traffic_exists() -> None:
    policy = TemporalPolicy(Rules(long_cap=1, max_hide_s=5.0))
    # No short request was ever seen.
    assert names(look(policy, "l1 l2 l3", long_in_stage=1)) == "l1 l2 l3"
    policy.saw_short(now_s=1.0)
    assert names(look(policy, "l1 l2 l3", now_s=2.0, long_in_stage=1)) == ""
    assert names(look(policy, "l1 l2 l3", now_s=6.5, long_in_stage=1)) == "l1 l2 l3"


def test_who_was_hidden_for_long_is_seen_until_one_has_entered() -> None:
    policy = TemporalPolicy(Rules(rotation=False, long_cap=1, max_hide_s=5.0))
    seen = []
    for now_s in (0.0, 4.9, 5.0, 5.1):
        seen.append(names(look(policy, "s1 l1 l2", now_s, long_in_stage=1)))
    policy.entered(Path.LONG)
    seen.append(names(look(policy, "s1 l2", 5.2, long_in_stage=2)))
    assert seen == ["s1", "s1", "s1 l1", "s1 l1", "s1"]


def test_nothing_is_hidden_when_the_stage_would_idle() -> None:
    policy = TemporalPolicy(Rules(long_cap=1))
    policy.saw_short(0.0)
    assert names(look(policy, "l1 l2", long_in_stage=1, busy=True)) == ""
    assert names(look(policy, "l1 l2", long_in_stage=1, busy=False)) == "l1 l2"


def test_lost_groups_go_last_and_keep_nobody_out() -> None:
    policy = TemporalPolicy()
    waiting = [group("s1", -1.0), group("s2", 1.5), group("s3")]
    view = look(policy, waiting)
    assert names(view) == "s2 s3 s1"
    assert (view.protected, view.lost) == (1, 1)


def test_lost_protect_is_the_papers_literal_rule() -> None:
    policy = TemporalPolicy(Rules(u_lost=None))
    waiting = [group("s1", -1.0), group("s2", 1.5), group("s3")]
    view = look(policy, waiting)
    assert names(view) == "s1 s2 s3"
    assert (view.protected, view.lost) == (2, 0)


def test_lost_groups_are_not_starved_by_those_that_can_still_win() -> None:
    policy = TemporalPolicy()
    first = []
    for _ in range(3 * (LOST_SHARE + 1)):
        first.append(look(policy, [group("s1", -1.0), group("s2", 1.5)], limit=1).order[0].group)
    assert first == (["s2"] * LOST_SHARE + ["s1"]) * 3


def test_a_lost_long_group_gets_its_share_although_ordinary_ones_fill_the_cap() -> None:
    policy = TemporalPolicy(Rules(long_cap=2))
    seen = 0
    for tick in range(22 * (LOST_SHARE + 1)):
        waiting = [group("s1"), group("l1", -1.0), group("l2")]
        view = look(policy, waiting, now_s=tick * 1e-4, long_in_stage=1, limit=3)
        seen += view.order[0].group == "l1"
    assert seen == 22


def test_a_lost_group_of_the_long_path_is_under_the_cap() -> None:
    policy = TemporalPolicy(Rules(long_cap=2))
    waiting = [group("s1"), group("l1", -1.0), group("l2", -2.0), group("l3", -3.0)]
    assert names(look(policy, waiting, long_in_stage=1)) == "s1 l3"
    assert names(look(policy, waiting, long_in_stage=2)) == "s1"


def test_the_first_of_a_path_is_hidden_for_max_hide_s_at_most() -> None:
    policy = TemporalPolicy(Rules(long_cap=1, max_hide_s=5.0))
    seen = []
    for tenth in range(0, 160):
        view = look(policy, "s1 l1 l2", now_s=tenth / 10, long_in_stage=1, limit=3)
        if "l1" in names(view):
            seen.append(tenth)
            assert names(view).split().count("l2") == 0, "one long group above the cap, not all"
    assert seen[0] == 50
    assert max(b - a for a, b in zip(seen, seen[1:], strict=False)) <= 52


def test_the_view_names_no_more_than_the_step_can_admit() -> None:
    policy = TemporalPolicy(Rules(rotation=False))
    assert names(look(policy, "s1 s2 s3 l1", limit=2)) == "s1 s2"


def test_a_group_that_cannot_make_it_any_more_is_lost_before_its_deadline() -> None:
    policy = TemporalPolicy(Rules(u_lost=0.5))
    waiting = [group("s1", 0.4), group("s2", 0.6)]  # both need 1 s
    assert names(look(policy, waiting)) == "s2 s1"
    assert names(look(TemporalPolicy(Rules(u_lost=0.0)), waiting)) == "s1 s2"


deadlines = st.floats(-20, 120)
waitings = st.lists(st.tuples(st.sampled_from("sl"), deadlines), max_size=30)


@given(
    waitings,
    st.builds(
        Rules,
        rotation=st.booleans(),
        slack_guard=st.booleans(),
        u_guard=st.floats(0.5, 4),
        u_lost=st.none() | st.floats(0, 1),
        long_cap=st.none() | st.integers(1, 8),
    ),
    st.lists(st.tuples(st.floats(0, 30), st.integers(1, 9), st.integers(0, 9), st.booleans())),
)
def test_a_view_invents_nothing_and_keeps_the_stage_busy(
    drawn: list[tuple[str, float]],
    rules: Rules,
    steps: list[tuple[float, int, int, bool]],
) -> None:
    policy = TemporalPolicy(rules)
    made = [group(f"{letter}{i}", at_s) for i, (letter, at_s) in enumerate(drawn)]
    waiting = Waiting(made)
    for now_s, limit, long_in_stage, busy in sorted(steps):
        view = policy.view(waiting, now_s, limit, long_in_stage, busy)
        assert len(view.order) == len(set(view.order)) <= limit
        assert set(view.order) <= set(made)
        assert 0 <= view.hidden <= len(made)
        if made and not busy:
            assert view.order
        if view.hidden == 0:
            assert len(view.order) == min(limit, len(made))


@settings(max_examples=30)
@given(st.lists(st.sampled_from([0.5, 1.5, 9.0]), min_size=200, max_size=200))
def test_long_is_offered_a_fifth_of_the_contested_steps(slack: list[float]) -> None:
    """Whatever the shorts' slack does, and although protected ones come first."""
    policy = TemporalPolicy(Rules(long_cap=None))
    offered = contested = 0
    for left_s in slack:
        waiting = [group("s1"), group("s2", left_s), group("l1")]
        view = look(policy, waiting, limit=3)
        contested += 1
        offered += "l1" in names(view)
    assert contested == 200
    assert offered >= contested * M / (N_MAX + M)
