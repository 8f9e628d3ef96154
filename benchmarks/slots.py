"""Every policy at the paper's 4 slots, and at its own best slot count and token budget.

    python benchmarks/slots.py --model DIR --deploy FILE --out DIR

docs/benchmarks.md says what it measures. Start it again with the same --out to go on.
"""

from __future__ import annotations

from dataclasses import replace

from horizonserve.bench.calibrate import QUICK
from horizonserve.bench.report import run_study, study_arguments
from horizonserve.bench.slots_study import SlotsConfig, SlotsStudy
from horizonserve.workload import Mix


def main() -> None:
    """Config, seeds, run."""
    parser = study_arguments(__doc__)
    parser.add_argument("--parts", default="ab", choices=("a", "b", "ab"))
    parser.add_argument("--audio-share", type=float, default=0.3)
    parser.add_argument("--token-budgets", type=int, nargs="+", default=[4_096, 512])
    parser.add_argument("--ablations", action="store_true")
    a = parser.parse_args()
    config = SlotsConfig(
        mix=Mix.of_audio_share(a.audio_share),
        seeds=tuple(a.seeds),
        parts=tuple(a.parts),
        token_budgets=tuple(a.token_budgets),
        ablations=a.ablations,
        time_limit_s=a.time_limit_s,
    )
    if a.quick:
        config = replace(
            config,
            paper_duration_s=20.0,
            pick_duration_s=10.0,
            best_duration_s=15.0,
            drain_limit_s=10.0,
            effort=QUICK,
        )
    run_study(SlotsStudy, config, a.model, a.deploy, a.out, port=a.port)


if __name__ == "__main__":
    main()
