"""Attainment of `horizon` with a profile against constants per class, interleaved on one server.

    python benchmarks/estimate_attainment.py --model DIR --deploy FILE --profile FILE --out DIR

Start it again with the same --out to go on.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from horizonserve.bench.calibrate import QUICK
from horizonserve.bench.estimate_study import EstimateConfig, EstimateStudy
from horizonserve.bench.report import run_study, study_arguments


def main() -> None:
    """Config, seeds, run."""
    parser = study_arguments(__doc__)
    usual = EstimateConfig()
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--loads", type=float, nargs="+", default=usual.loads)
    parser.add_argument("--duration-s", type=float, default=usual.duration_s)
    a = parser.parse_args()
    config = EstimateConfig(
        seeds=tuple(a.seeds),
        loads=tuple(a.loads),
        duration_s=a.duration_s,
        time_limit_s=a.time_limit_s,
    )
    if a.quick:
        config = replace(config, seeds=config.seeds[:1], duration_s=15.0, effort=QUICK)
    env = {"HORIZON_PROFILE": str(a.profile.absolute())}
    run_study(EstimateStudy, config, a.model, a.deploy, a.out, port=a.port, env=env)


if __name__ == "__main__":
    main()
