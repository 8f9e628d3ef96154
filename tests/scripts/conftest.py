import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
# Scripts are not part of the installed package; the fakes are those of the spatial tests.
sys.path[:0] = [str(TESTS.parent / "scripts"), str(TESTS / "spatial" / "fakes")]
