"""`python scripts/gpu_check --out DIR`: check every claim, print a table, exit 1 if one fails."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "src")]

if __name__ == "__main__":
    from gpu_check.cli import main

    sys.exit(main())
