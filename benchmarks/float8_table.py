"""XLA's estimates of products in bfloat16 and in 8-bit floats on absent GPUs, against what the policy `fp8` expects.

    python benchmarks/float8_table.py [--targets h100 h200] [--rows 16384] [--widths 1024 2048 4096 8192]

One line is ``(rows, depth) @ (depth, columns)`` and its gradient with regard to the left operand; in 8 bits the
operands are scaled by their largest magnitudes first, from and to memory.  Nothing is run or measured.  The results are
saved to benchmarks/results/float8.json and float8.md.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from results import write_json, write_markdown

from xla_amp.lowering.linalg.float8 import float8_contract
from xla_amp.policy import float8
from xla_amp.tools.inspect import targets


def low(x: Any, weight: Any, gradient: Any) -> Any:
    """Product and gradient in bfloat16."""
    return x @ weight, lax.dot_general(gradient, weight, (((1,), (1,)), ((), ())))


def eight(x: Any, weight: Any, gradient: Any) -> Any:
    """The same with operands in 8 bits."""
    y = float8_contract(x, weight, ((1,), (0,)), formats=("e4m3", "e4m3"), platform="gpu")
    return y, float8_contract(gradient, weight, ((1,), (1,)), formats=("e5m2", "e4m3"), platform="gpu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """Seconds of one product and its gradient."""

    target: str
    rows: int
    depth: int
    columns: int
    xla_low: float
    xla_float8: float
    calls: int
    """8-bit products in the compiled program."""
    policy_low: float
    policy_float8: float

    @property
    def cells(self) -> list[str]:
        """For the table."""
        times = [f"{value * 1e6:.0f}" for value in (self.xla_low, self.xla_float8)]
        ours = [f"{value * 1e6:.0f}" for value in (self.policy_low, self.policy_float8)]
        decided = "fp8" if self.policy_float8 < self.policy_low else "bfloat16"
        shape = f"{self.rows} x {self.depth} x {self.columns}"
        return [self.target, shape, *times, f"{self.xla_low / self.xla_float8:.2f}", *ours, decided]


HEADINGS = (
    *("target", "rows x depth x columns", "XLA: bf16, us", "XLA: fp8, us", "times faster"),
    *("policy: bf16, us", "policy: fp8, us", "policy `fp8` takes"),
)


def measure(compilers: targets.Compilers, target: str, rows: int, depth: int, columns: int) -> Row:
    """Both forms, compiled for `target`."""
    shapes = ((rows, depth), (depth, columns), (rows, columns))
    arguments = [jax.ShapeDtypeStruct(each, jnp.bfloat16) for each in shapes]
    plain = compilers.compile(targets.lower(low, *arguments, target=target), target)
    small = compilers.compile(targets.lower(eight, *arguments, target=target), target)
    expected = float8.estimate(rows, depth, columns, target)
    return Row(
        target=target,
        rows=rows,
        depth=depth,
        columns=columns,
        xla_low=plain.seconds or 0.0,
        xla_float8=small.seconds or 0.0,
        calls=small.hlo.count('custom_call_target="__cublas$lt$matmul$f8"'),
        policy_low=expected.low,
        policy_float8=expected.float8,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", default=list(float8.targets()))
    parser.add_argument("--rows", type=int, nargs="+", default=[2048, 16384])
    parser.add_argument("--widths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    options = parser.parse_args()
    found: list[Row] = []
    with targets.Compilers() as compilers:
        for target in options.targets:
            for rows in options.rows:
                for width in options.widths:
                    for columns in (width, 4 * width):
                        found.append(measure(compilers, target, rows, width, columns))
    write_json("float8", {"rows": [dataclasses.asdict(row) for row in found]})
    write_markdown("float8", HEADINGS, [row.cells for row in found], __doc__.splitlines()[0])


if __name__ == "__main__":
    main()
