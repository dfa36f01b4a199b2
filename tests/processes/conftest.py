"""What the tests on simulated devices have: objectives, decoders."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS / folder) for folder in ("mesh", "laws", "train")]
