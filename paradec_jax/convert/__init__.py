"""The converters of a checkout, whose files lie in the folder `convert` beside the package; a wheel
has them here.
"""

from pathlib import Path

__path__ = [str(Path(__file__).parents[2] / "convert")]
