import sys
from pathlib import Path

# The conformance gate is a script, not part of the installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
