"""What is checked: the parts in the order of their run, and the claims that each decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from gpu_check import verdicts
from gpu_check.children import SIDES
from gpu_check.verdicts import Judge


@dataclass(frozen=True, slots=True)
class Claim:
    text: str
    judge: Judge


@dataclass(frozen=True, slots=True)
class Part:
    """One probe and the claims that its figures decide."""

    name: str
    #: A function of probes.py or torch_probes.py.
    probe: str
    #: Time it takes on a current GPU; with less left it is not begun.
    needs_s: float
    #: Time after which its processes are ended.
    limit_s: float
    claims: Mapping[str, Claim]
    sides: tuple[str, ...] = SIDES[:1]
    mps: bool = False
    #: Variables of each run of the probe.
    runs: tuple[Mapping[str, str], ...] = ({},)


PARTS: Final = (
    Part(
        "levels",
        "levels",
        needs_s=3,
        limit_s=30,
        sides=SIDES,
        claims={
            "levels.exist": Claim("the die has levels below the whole", verdicts.levels_exist),
            "levels.agree": Claim(
                "two processes see identical fingerprints", verdicts.levels_agree
            ),
        },
    ),
    Part(
        "smid",
        "smid",
        needs_s=6,
        limit_s=40,
        sides=SIDES,
        claims={
            "smid.disjoint": Claim("the sides use no SM in common", verdicts.smid_disjoint),
            "smid.granted": Claim("no side uses more SMs than granted", verdicts.smid_granted),
        },
    ),
    Part(
        "corun",
        "corun",
        needs_s=8,
        limit_s=40,
        sides=SIDES,
        claims={"corun.turns": Claim("without MPS the sides take turns", verdicts.take_turns)},
    ),
    Part(
        "switch",
        "switch",
        needs_s=4,
        limit_s=30,
        claims={
            "switch.own": Claim(
                f"our part of an activation takes at most {verdicts.OWN_ACTIVATION_US:.0f} us",
                verdicts.activation_own,
            )
        },
    ),
    Part(
        "switch-torch",
        "switch_torch",
        needs_s=10,
        limit_s=60,
        claims={
            "switch.torch": Claim(
                "an activation with torch takes about 5 us (paper)", verdicts.activation_paper
            )
        },
    ),
    Part(
        "nvml",
        "nvml",
        needs_s=7,
        limit_s=25,
        claims={
            "nvml.latency": Claim("a sample takes at most 10 ms (p99)", verdicts.nvml_latency),
            "nvml.period": Claim("a new sample comes at least every second", verdicts.nvml_period),
        },
    ),
    Part(
        "nvml-load",
        "nvml_load",
        needs_s=14,
        limit_s=45,
        claims={
            "nvml.utilisation": Claim(
                "memory utilisation tells a bandwidth loop from idling",
                verdicts.load_seen_by_utilisation,
            ),
            "nvml.dram": Claim(
                "GPM DRAM bandwidth tells a bandwidth loop from idling",
                verdicts.load_seen_by_dram,
            ),
        },
    ),
    Part(
        "nvml-launch",
        "nvml_launch",
        needs_s=11,
        limit_s=40,
        claims={
            "nvml.launches": Claim(
                "sampling at 10 Hz does not slow launches", verdicts.launches_undisturbed
            )
        },
    ),
    Part(
        "graphs",
        "graphs",
        needs_s=12,
        limit_s=60,
        claims={
            "graphs.keep": Claim(
                "a CUDA graph keeps the level of its capture", verdicts.graph_keeps_its_level
            ),
            "graphs.follow": Claim(
                "one graph captured per level runs as eager work there",
                verdicts.graph_per_level_follows,
            ),
        },
    ),
    Part(
        "smid-mps",
        "smid",
        needs_s=8,
        limit_s=60,
        sides=SIDES,
        mps=True,
        claims={
            "smid-mps.disjoint": Claim(
                "under MPS the sides use no SM in common", verdicts.smid_disjoint
            ),
            "smid-mps.granted": Claim(
                "under MPS no side uses more SMs than granted", verdicts.smid_granted
            ),
        },
    ),
    Part(
        "corun-mps",
        "corun",
        needs_s=8,
        limit_s=60,
        sides=SIDES,
        mps=True,
        claims={
            "corun-mps.beside": Claim("under MPS the sides run side by side", verdicts.side_by_side)
        },
    ),
    Part(
        "interference",
        "interference",
        needs_s=60,
        limit_s=150,
        sides=SIDES,
        mps=True,
        claims={
            "interference.uncapped": Claim(
                "a capped shared stage has a lower TTFT than without caps, TPOT within 10%",
                verdicts.capped_beats_uncapped,
            ),
            "interference.fullest": Claim(
                "... and than on the rung with the most SMs (paper 3.3)",
                verdicts.capped_beats_fullest,
            ),
        },
    ),
    Part(
        "percentage-mps",
        "smid",
        needs_s=12,
        limit_s=60,
        sides=SIDES,
        mps=True,
        runs=({}, {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"}),
        claims={
            "percentage.changes": Claim(
                "an MPS thread percentage of 50 changes the SMs of a level (so it is refused)",
                verdicts.percentage_changes,
            )
        },
    ),
)
