"""Compile for absent hardware: every target keeps the dtypes of a product, and says what it does not know."""

from __future__ import annotations

import hlo_text
import jax
import jax.numpy as jnp
import pytest
import targets

N = 1024


def layer(x, weight):
    return jnp.tanh(x @ weight).sum(0)


def arguments(dtype):
    return [jax.ShapeDtypeStruct((N, N), dtype)] * 2


@pytest.mark.full
@pytest.mark.parametrize("target", targets.NAMES)
def test_a_low_product_stays_low_and_a_wide_one_wide(compile_for, target):
    """Also on B200, for which XLA widens bfloat16 if its description lacks fields."""
    for dtype in (jnp.bfloat16, jnp.float32):
        compiled = compile_for(targets.lower(layer, *arguments(dtype), target=target), target)
        ((left, right, _), count), *rest = compiled.contractions().items()
        assert (left, right, count, rest) == (dtype.dtype.name, dtype.dtype.name, 1, [])
        assert compiled.argument_memory == 2 * N * N * dtype.dtype.itemsize
        assert compiled.peak_memory >= compiled.argument_memory
        # Both operands are read at least once; sums of the parts bound what a fused program can save.
        assert compiled.argument_memory <= compiled.bytes_accessed <= 16 * N * N * 4


HLO = """
%fused (p.0: bf16[2,2], p.1: f32[2,2]) -> f32[2,2] {
  %p.0 = bf16[2,2]{1,0} parameter(0)
  %p.1 = f32[2,2]{1,0:T(8,128)} parameter(1)
  ROOT %dot.1 = f32[2,2]{1,0} dot(%p.0, %p.1), lhs_contracting_dims={1}
}

ENTRY %main (a: f16[2,2]) -> f32[2,2] {
  %a = f16[2,2]{1,0} parameter(0)
  %gemm = (f16[2,2]{1,0}, s8[64]{0}) custom-call(%a, %a), custom_call_target="__cublas$gemm"
  %other = f16[2,2]{1,0} custom-call(%a, %a), custom_call_target="mine"
  ROOT %r = f32[2,2]{1,0} fusion(%a, %a), kind=kLoop, calls=%fused
}
"""


def test_contractions_are_read_from_hlo_text():
    assert hlo_text.contractions(HLO) == {("bfloat16", "float32", "float32"): 1, ("float16", "float16", "float16"): 1}
    assert hlo_text.contractions("") == {}
