"""`python scripts/conformance --work DIR`: run it all, print a table, exit 1 on a regression."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":
    from conformance.cli import main

    sys.exit(main())
