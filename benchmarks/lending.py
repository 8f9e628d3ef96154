"""`horizon` with no slot count against every other policy at its best, and its rules one by one.

    python benchmarks/lending.py --model DIR --deploy FILE --out DIR

docs/benchmarks.md says what it measures. Start it again with the same --out to go on.
"""

from __future__ import annotations

from dataclasses import replace

from horizonserve.bench.calibrate import QUICK
from horizonserve.bench.lending_study import ABLATION, LendingConfig, LendingStudy
from horizonserve.bench.report import run_study, study_arguments


def main() -> None:
    """Config, seeds, run."""
    parser = study_arguments(__doc__)
    parts = ("rates", ABLATION)
    parser.add_argument("--parts", nargs="+", default=list(parts), choices=parts)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 1.0, 1.5, 2.0])
    parser.add_argument("--duration-s", type=float, default=120.0)
    a = parser.parse_args()
    config = LendingConfig(
        seeds=tuple(a.seeds),
        parts=tuple(a.parts),
        loads=tuple(a.loads),
        duration_s=a.duration_s,
        time_limit_s=a.time_limit_s,
    )
    if a.quick:
        config = replace(
            config,
            seeds=config.seeds[:1],
            slots=(4, 16),
            token_budgets=(4_096, 512),
            pick_duration_s=10.0,
            duration_s=15.0,
            drain_limit_s=10.0,
            effort=QUICK,
        )
    run_study(LendingStudy, config, a.model, a.deploy, a.out, port=a.port)


if __name__ == "__main__":
    main()
