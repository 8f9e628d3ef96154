"""`horizon` with no slot count against every other policy at its best, and its rules one by one.

    python benchmarks/lending.py --model DIR --deploy FILE --out DIR

docs/benchmarks.md says what it measures. Start it again with the same --out to go on.
"""

from __future__ import annotations

from dataclasses import replace

from horizonserve.bench.calibrate import QUICK
from horizonserve.bench.lending_study import LendingConfig, LendingStudy
from horizonserve.bench.report import run_study, study_arguments


def main() -> None:
    """Config, seeds, run."""
    parser = study_arguments(__doc__)
    usual = LendingConfig()
    add = parser.add_argument
    add("--parts", nargs="+", default=usual.parts, choices=usual.parts)
    add("--loads", type=float, nargs="+", default=usual.loads)
    add("--slots", type=int, nargs="+", default=usual.slots)
    add("--token-budgets", type=int, nargs="+", default=usual.token_budgets)
    add("--duration-s", type=float, default=usual.duration_s)
    a = parser.parse_args()
    config = LendingConfig(
        seeds=tuple(a.seeds),
        parts=tuple(a.parts),
        loads=tuple(a.loads),
        slots=tuple(a.slots),
        token_budgets=tuple(a.token_budgets),
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
