"""Time of `xla_amp.stablehlo.autocast` by module size.

    python benchmarks/stablehlo_scaling.py [OPERATIONS...]

The module is a chain of layers like those of a training step: contraction, bias, tanh, layer norm, residual, a function
call.  Seconds are CPU time of one process on one core, so that other work on the machine does not count; they include
parsing the module and verifying the result.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

_LAYER = """
  %w{i} = stablehlo.constant dense<{value}> : tensor<8x8xf32>
  %d{i} = stablehlo.dot_general %x{i}, %w{i}, contracting_dims = [1] x [0] : (tensor<4x8xf32>, tensor<8x8xf32>) -> tensor<4x8xf32>
  %b{i} = stablehlo.broadcast_in_dim %bias, dims = [1] : (tensor<8xf32>) -> tensor<4x8xf32>
  %a{i} = stablehlo.add %d{i}, %b{i} : tensor<4x8xf32>
  %t{i} = stablehlo.tanh %a{i} : tensor<4x8xf32>
  %e{i} = stablehlo.dot_general %t{i}, %w{i}, contracting_dims = [1] x [1] : (tensor<4x8xf32>, tensor<8x8xf32>) -> tensor<4x8xf32>
  %r{i} = call @relu(%e{i}) : (tensor<4x8xf32>) -> tensor<4x8xf32>
  %s{i} = stablehlo.reduce(%r{i} init: %zero) applies stablehlo.add across dimensions = [1] : (tensor<4x8xf32>, tensor<f32>) -> tensor<4xf32>
  %q{i} = stablehlo.rsqrt %s{i} : tensor<4xf32>
  %g{i} = stablehlo.broadcast_in_dim %q{i}, dims = [0] : (tensor<4xf32>) -> tensor<4x8xf32>
  %n{i} = stablehlo.multiply %r{i}, %g{i} : tensor<4x8xf32>
  %x{j} = stablehlo.add %n{i}, %x{i} : tensor<4x8xf32>
"""  # noqa: E501 - one operation of MLIR a line
_PER_LAYER = 13

_MODULE = """
func.func @main(%x0: tensor<4x8xf32>, %bias: tensor<8xf32>) -> tensor<4x8xf32> {{
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  {layers}
  return %x{last} : tensor<4x8xf32>
}}
func.func private @relu(%x: tensor<4x8xf32>) -> tensor<4x8xf32> {{
  %zero = stablehlo.constant dense<0.0> : tensor<4x8xf32>
  %y = stablehlo.maximum %x, %zero : tensor<4x8xf32>
  return %y : tensor<4x8xf32>
}}
"""


def module_of(operations: int) -> str:
    """MLIR text with about `operations` operations."""
    layers = max(1, operations // _PER_LAYER)
    body = "".join(_LAYER.format(i=i, j=i + 1, value=f"{0.001 * (i % 97 + 1):.6f}") for i in range(layers))
    return _MODULE.format(layers=body, last=layers)


def main(argv: Sequence[str] | None = None) -> int:
    """Print one line for each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operations", nargs="*", type=int, default=[1_000, 3_000, 10_000, 30_000, 100_000])
    sizes = parser.parse_args(argv).operations

    from xla_amp.stablehlo import autocast, ir

    print(f"{'operations':>10} {'seconds':>8} {'us/operation':>13} {'casts':>7}")
    autocast(module_of(_PER_LAYER))  # tables and policies are read once
    for size in sizes:
        text = module_of(size)
        count = sum(1 for _ in ir.operations(ir.parse(text).operation))
        start = time.process_time()
        converted = autocast(text)
        seconds = time.process_time() - start
        casts = sum(converted.report.casts.values())
        print(f"{count:>10} {seconds:>8.2f} {seconds / count * 1e6:>13.1f} {casts:>7}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
