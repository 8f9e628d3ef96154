"""Who ran and who lent its place in the slots of the shared stage, from a server's step log.

    HORIZON_STEP_LOG=steps.jsonl vllm-omni serve MODEL --omni --scheduler horizon
    python benchmarks/lending_picture.py steps-PID.jsonl --out slots.png

Without --from-s it shows where the most was lent.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from horizonserve.bench.lending_picture import busiest_s, load, plot
from horizonserve.bench.table import KIND


def main() -> None:
    """Read, choose, draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("log", type=Path, metavar="LOG")
    parser.add_argument("--out", type=Path, required=True, metavar="PNG")
    parser.add_argument("--from-s", type=float, help="seconds from the log's first step")
    parser.add_argument("--for-s", type=float, default=6.0)
    a = parser.parse_args()
    try:
        steps = load(a.log)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    from_s = busiest_s(steps, a.for_s) if a.from_s is None else a.from_s
    plot(steps, a.out, f"Slots over time ({KIND})", from_s, a.for_s)
    print(f"{a.out}: {len(steps)} steps, {from_s:.1f} s to {from_s + a.for_s:.1f} s")


if __name__ == "__main__":
    main()
