"""What this project claims about speed, measured on the device at hand: one folder of tables, pictures and verdicts.

`parts` says what a part is, `registry` lists the parts in the order of their importance, `claims` what is claimed,
`judging` when it holds, `run` measures inside a budget of minutes and goes on where it stopped, `write` makes the
report.
"""

from paradec_jax.report.claims import CLAIMS
from paradec_jax.report.judging import Claim, Figure
from paradec_jax.report.parts import Part, Table, Task
from paradec_jax.report.registry import PARTS
from paradec_jax.report.run import report
from paradec_jax.report.sizes import Sizes, sizes_here

__all__ = ["CLAIMS", "PARTS", "Claim", "Figure", "Part", "Sizes", "Table", "Task", "report", "sizes_here"]
