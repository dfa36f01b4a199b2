"""The laws' table of decoders, which the tests here run on a mesh."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "laws"))
