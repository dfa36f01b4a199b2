"""In what precision a training multiplies, where its recipe does not say."""

import re
from pathlib import Path

import jax

BFLOAT16 = "BF16_BF16_F32"  # factors in bfloat16, sums in float32


def natural(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """`jax.default_matmul_precision` for this device: bfloat16 factors where it has units for them, else float32.

    Accelerators have them, and processors with AMX. Others compute in float32 all the same, after conversions that
    cost time.
    """
    if jax.default_backend() != "cpu":
        return BFLOAT16
    try:
        told = cpuinfo.read_text(encoding="utf-8")
    except OSError:  # not Linux
        told = ""
    return BFLOAT16 if re.search(r"\bamx_bf16\b", told) else "float32"
