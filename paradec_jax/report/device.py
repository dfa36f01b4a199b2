"""What the device does at most: copies, reads and products, at the sizes of the models."""

from paradec_jax.families import PRESETS
from paradec_jax.report.parts import Part, Result, Table, Task
from paradec_jax.report.sizes import bytes_of, with_dtype
from paradec_jax.report.timing import MOST_READ, limits_for


def measure(task: Task) -> Result:
    """Rates for weights as large as each preset's; presets that are read alike share a row."""
    dtype, rows = task.sizes.dtype, dict[int, Result]()
    for name, own in task.each(task.sizes.presets):
        what = f"rates at the size of {name}"
        if not own.has(0.0, what):
            continue
        read = min(bytes_of(with_dtype(PRESETS[name], dtype)), MOST_READ)
        if read in rows:
            rows[read]["presets"].append(name)
        elif own.fits(2 * read, what):
            with own.survives(what):
                found = limits_for(dtype, read)
                rows[read] = {
                    "presets": [name],
                    "read_bytes": read,
                    "copy_bytes_per_second": found.bytes_per_second,
                    "read_bytes_per_second": found.read_bytes_per_second,
                    "flops_per_second": found.flops_per_second,
                }
    return {"dtype": dtype, "rows": list(rows.values())}


def tables(result: Result) -> list[Table]:
    """One line a size."""
    rows = [
        [
            f"{row['read_bytes'] / 1e6:.1f}",
            ", ".join(row["presets"]),
            f"{row['copy_bytes_per_second'] / 1e9:.1f}",
            f"{row['read_bytes_per_second'] / 1e9:.1f}",
            f"{row['flops_per_second'] / 1e9:.0f}",
        ]
        for row in result["rows"]
    ]
    return [
        Table(
            "What the device does at most",
            ("MB of weights", "as large as", "copies, GB/s", "reads, GB/s", "products, GFLOP/s"),
            rows,
            f"Copies: 256 MiB onto themselves, bytes read and written. Reads: products of a matrix of that size, at "
            f"most {MOST_READ / 1e6:.0f} MB, with one vector after another. Products: of two large square matrices "
            f"in {result['dtype']}, sums in float32.",
        )
    ]


DEVICE = Part("device", "The device", 1.0, measure, tables)
