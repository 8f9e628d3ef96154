"""Base and LoRA work at the same time: the results, and the order that the driver sees."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horizonserve.lora.parallel import InTurn, Work, run

DIES = {
    "108": {"sms": 108, "cc": 80, "driver": 12080},
    "132": {"sms": 132, "cc": 90, "driver": 13010},
}


@st.composite
def batches(draw: st.DrawFn) -> dict[str, object]:
    return {
        "tokens": draw(st.integers(1, 6)),
        "slices": draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)),
        # -1: a token without an adapter.
        "adapters": draw(st.lists(st.integers(-1, 2), min_size=6, max_size=6)),
        "seed": draw(st.integers(0, 2**16)),
        "dtype": draw(st.sampled_from(["bfloat16", "float32"])),
    }


def _layer(batch: dict[str, object]):
    """The parts of a layer with LoRA in plain torch, and its output by one formula."""
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, str(batch["dtype"]))
    made = torch.Generator().manual_seed(batch["seed"])
    tokens, slices = batch["tokens"], batch["slices"]
    adapters = torch.tensor(batch["adapters"][:tokens])
    with_one = (adapters >= 0).nonzero().flatten()
    inputs, rank, outputs = 4, 2, sum(slices)

    def random(*shape: int):
        return torch.randn(shape, generator=made).to(dtype)

    x, weight = random(tokens, inputs), random(outputs, inputs)
    lora_a = [random(3, rank, inputs) for _ in slices]
    lora_b = [random(3, width, rank) for width in slices]

    def base():
        return x @ weight.T

    def shrink():
        rows = [x[t] @ a[adapters[t]].T for a in lora_a for t in with_one]
        return torch.stack(rows).view(len(slices), -1, rank) if rows else None

    def expand(output, shrunk):
        begin = 0
        for number, width in enumerate(slices):
            for row, token in enumerate(with_one):
                b = lora_b[number][adapters[token]]
                output[token, begin : begin + width] += shrunk[number, row] @ b.T
            begin += width

    def zeros():
        return torch.zeros(tokens, outputs, dtype=dtype)

    work = Work(base, shrink, expand, zeros)
    sequential = base()
    expand(sequential, shrink())
    return torch, work, sequential, base(), adapters


@given(batches())
def test_shrink_leaves_every_bit_as_it_was(batch: dict[str, object]) -> None:
    torch, work, sequential, _, _ = _layer(batch)
    assert torch.equal(run(InTurn(), "shrink", work), sequential)


@given(batches())
def test_full_rounds_once_more_and_leaves_tokens_without_an_adapter(
    batch: dict[str, object],
) -> None:
    torch, work, sequential, base, adapters = _layer(batch)
    output = run(InTurn(), "full", work)
    step = torch.finfo(output.dtype).eps
    # Of the largest of what is added up.
    room = 2 * step * (base.abs() + (sequential - base).abs() + sequential.abs())
    assert ((output - sequential).abs() <= room + step).all()
    assert torch.equal(output[adapters < 0], base[adapters < 0])


@pytest.mark.parametrize(
    ("die", "pair"), [("108", (80, 28)), ("108", (28, 80)), ("132", (96, 36)), ("132", (124, 8))]
)
def test_the_driver_sees_both_sides_fork_and_join(forked, die: str, pair: tuple[int, int]) -> None:
    said, lines = forked(pair, **DIES[die])
    assert said["returned"] == ["base", "lora"]
    base, lora = _sides(pair, int(die))
    order = [line.split() for line in lines if line[0] in "rwbl" and "event" not in line]
    order = order[[line[:2] for line in order].index(["record", "outer"]) :]
    events = {line[2] for line in order if len(line) == 3}
    assert len(events) == 3
    start, first, second = order[0][2], order[5][2], order[7][2]
    once = [
        ["record", "outer", start],
        ["wait", base, start],
        ["base"],
        ["wait", lora, start],
        ["lora"],
        ["record", base, first],
        ["wait", "outer", first],
        ["record", lora, second],
        ["wait", "outer", second],
    ]
    assert order == once * 2
    # Kept to process end, and the surrounding stream is in use again.
    assert not [line for line in lines if line.startswith("-")]
    assert said["stream"] == 0 and said["context"] == 0 and said["streams"] == 2


def _sides(pair: tuple[int, int], total: int) -> tuple[str, str]:
    """The SMs of base and LoRA side: groups start at SM 0, in whole granules."""
    base, lora = pair
    granule = 2 if total == 108 else 8
    if base % granule == 0:
        return f"0-{base}", f"{base}-{total}"
    return f"{lora}-{total}", f"0-{lora}"


@pytest.mark.parametrize(("raising", "sides"), [("base", 1), ("lora", 2)])
def test_an_error_on_a_side_leaves_nothing_unjoined(forked, raising: str, sides: int) -> None:
    said, lines = forked((96, 36), raising=raising)
    assert said["raised"] == repr(raising) and said["notes"] == []
    assert said["stream"] == 0
    order = [line.split() for line in lines if line.startswith(("record", "wait"))]
    waited = [line[1] for line in order if line[0] == "wait"]
    assert waited == ["0-96", "96-132"][:sides] + ["outer"] * sides
    for line in order:
        if line[0] == "record" and line[1] != "outer":
            assert ["wait", "outer", line[2]] in order


# The second record is the base side's, after its work; the second wait the LoRA side's, before it.
@pytest.mark.parametrize("call", ["cuEventRecord", "cuStreamWaitEvent"])
def test_a_failing_driver_call_is_named(forked, call: str) -> None:
    said, _ = forked((96, 36), fail=f"{call}:801:2")
    assert said["error"].startswith(f"{call}: ") and "801" in said["error"]
    assert said["stream"] == 0


def test_what_fails_in_joining_does_not_hide_the_works_error(forked) -> None:
    said, _ = forked((96, 36), raising="base", fail="cuEventRecord:801:2")
    assert said["raised"] == "'base'" and "cuEventRecord" in said["notes"][0]


def test_a_pair_is_made_once(forked) -> None:
    said, lines = forked((96, 36), (36, 96), (96, 36))
    assert said["made"] == [[96, 36], [36, 96]]
    assert lines.count("context") == lines.count("stream") == 4


@pytest.mark.parametrize("pair", [(98, 34), (96, 32), (132, 0), (128, 4)])
def test_what_no_split_grants_is_refused_with_the_nearest(forked, pair: tuple[int, int]) -> None:
    said, lines = forked((8, 124), pair, **DIES["132"])
    assert f"{pair[0]} SMs to the base layer and {pair[1]}" in said["error"]
    assert "nearest is (" in said["error"]
    assert lines.count("context") == lines.count("-context") and "-event" in lines
    assert lines.count("push") == lines.count("pop") == 1


@pytest.mark.parametrize("call", ["cuGreenCtxCreate", "cuGreenCtxStreamCreate", "cuEventCreate"])
def test_a_partition_that_cannot_be_made_leaves_none(forked, call: str) -> None:
    said, lines = forked((96, 36), (64, 68), fail=f"{call}:801:4")
    assert said["error"].startswith(f"{call}: ")
    for made, gone in (("context", "-context"), ("stream", "-stream"), ("event", "-event")):
        assert lines.count(made) == lines.count(gone)
