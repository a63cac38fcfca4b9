"""Compile for absent hardware: every target of the table, and errors with advice."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from xla_amp.errors import DeviceError
from xla_amp.tools.inspect import hlo_text, target_worker, targets

N = 1024
TIMED = ("v5e", "v5p", "v6e", "a100", "h100", "h200", "b200")


def layer(x, weight):
    return jnp.tanh(x @ weight).sum(0)


def arguments(dtype):
    return [jax.ShapeDtypeStruct((N, N), dtype)] * 2


@pytest.fixture(scope="module")
def compilers():
    with targets.Compilers() as compilers:
        yield compilers


def needs(target: str) -> None:
    if not targets.available(target):
        pytest.skip(f"the compiler for {target} is not installed")


def test_the_targets_that_are_described():
    assert targets.names() == ("cpu", "v5e", "v5p", "v6e", "a100", "h100", "h200", "b200")


@pytest.mark.parametrize("target", [name for name in targets.names() if name != "cpu"])
def test_a_low_product_stays_low_and_a_wide_one_wide(compilers, target):
    """Also on B200, for which XLA widens bfloat16 if its description lacks fields."""
    needs(target)
    for dtype in (jnp.bfloat16, jnp.float32):
        compiled = compilers.compile(targets.lower(layer, *arguments(dtype), target=target), target)
        ((left, right, _), count), *rest = compiled.contractions().items()
        assert (left, right, count, rest) == (dtype.dtype.name, dtype.dtype.name, 1, [])
        assert compiled.argument_memory == 2 * N * N * dtype.dtype.itemsize
        assert compiled.peak_memory >= compiled.argument_memory
        # Both operands are read at least once; sums of the parts bound what a fused program can save.
        assert compiled.argument_memory <= compiled.bytes_accessed <= 16 * N * N * 4
        assert 2 * N**3 <= compiled.flops <= 1.2 * 2 * N**3
        assert compiled.memory_seconds == compiled.bytes_accessed / targets.specification(target)["bandwidth"]


def weight_gradient(x, weight):
    """Also for float32 results, which XLA's performance tables lack for low operands."""
    return jax.lax.dot_general(x, weight, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)


@pytest.mark.parametrize("function", [layer, weight_gradient])
@pytest.mark.parametrize("target", TIMED)
def test_estimated_time_is_plausible(compilers, target, function):
    """Between the time at the data sheet's peak and a thousand times that; shorter in the low dtype."""
    needs(target)
    seconds = {}
    for dtype in (jnp.bfloat16, jnp.float32):
        compiled = compilers.compile(targets.lower(function, *arguments(dtype), target=target), target)
        seconds[dtype] = compiled.seconds
        peak = 2.3e15  # operations per second: no target does more
        assert 2 * N**3 / peak < compiled.seconds < 1e-3, compiled.seconds_why
    assert seconds[jnp.bfloat16] < seconds[jnp.float32]


def test_no_estimate_is_none_with_a_reason(compilers):
    compiled = compilers.compile(targets.lower(layer, *arguments(jnp.float32), target="cpu"), "cpu")
    assert (compiled.seconds, compiled.seconds_why) == (None, "XLA:CPU estimates no time")


def test_text_bytecode_and_jaxs_lowered_are_the_same(compilers):
    lowered = jax.jit(layer).lower(*arguments(jnp.float32))
    forms = [lowered, lowered.compiler_ir("stablehlo"), lowered.as_text(), lowered.as_text().encode()]
    assert len({compilers.compile(form, "cpu").bytes_accessed for form in forms}) == 1


def test_a_module_for_four_devices(compilers):
    needs("v6e")
    text = targets.lower(layer, *arguments(jnp.float32), target="v6e")
    assert "mhlo.num_partitions = 1" in text
    four = text.replace("mhlo.num_partitions = 1", "mhlo.num_partitions = 4")
    assert "num_partitions=4" in compilers.compile(four, "v6e").hlo
    three = text.replace("mhlo.num_partitions = 1", "mhlo.num_partitions = 3")
    with pytest.raises(DeviceError, match="for 3 devices; this target has 1, 4, 8, 16, 32"):
        compilers.compile(three, "v6e")


def test_mistakes_are_named(compilers):
    with pytest.raises(DeviceError, match="target 'v9': expected one of cpu, v5e"):
        compilers.compile("", "v9")
    with pytest.raises(DeviceError, match=r"expected MLIR text or bytecode, .* got int"):
        compilers.compile(3, "cpu")
    with pytest.raises(DeviceError, match="compiling for cpu: MLIRError: Unable to parse module assembly"):
        compilers.compile("func.func @main(", "cpu")
    assert compilers.compile(targets.lower(layer, *arguments(jnp.float32), target="cpu"), "cpu").hlo


@pytest.mark.parametrize(("target", "what"), [("v6e", "libtpu"), ("h100", "CUDA plugin")])
def test_an_absent_compiler_is_named_with_what_installs_it(monkeypatch, target, what):
    monkeypatch.setattr(targets, "_installed", lambda module: False)
    assert not targets.available(target)
    with pytest.raises(DeviceError, match=rf"{what}.* is not installed: pip install 'xla-amp\[targets\]'"):
        targets.compile_for("", target)


def test_a_compiler_that_dies_is_an_error_and_the_next_one_works(compilers, monkeypatch):
    compilers.close()
    start = "import os, sys; sys.stderr.write('out of luck'); sys.stderr.flush(); os._exit(3)"
    with monkeypatch.context() as patched:
        popen = subprocess.Popen
        patched.setattr(subprocess, "Popen", lambda command, **rest: popen([sys.executable, "-c", start], **rest))
        with pytest.raises(DeviceError, match=r"(?s)ended without an answer; exit status 3, .*out of luck"):
            compilers.compile("", "cpu")
    assert compilers.compile(targets.lower(layer, *arguments(jnp.float32), target="cpu"), "cpu").hlo


def test_this_process_keeps_its_environment(compilers):
    before = dict(os.environ)
    compilers.compile(targets.lower(layer, *arguments(jnp.float32), target="cpu"), "cpu")
    assert dict(os.environ) == before


def test_rates_in_the_description_give_the_data_sheets_peak():
    """units x operations per clock x clock x multiprocessors x 2 for a multiply-add, for bfloat16 (key 16)."""
    row = targets.specification("h100")
    text = target_worker.device_description(row)
    matrix = text.partition("matrix_unit_description")[2]
    rate = int(matrix.partition("key: 16 ")[2].partition("ops_per_clock: ")[2].split()[0])
    assert rate * 4 * row["clock_ghz"] * 1e9 * row["multiprocessors"] * 2 == pytest.approx(989e12, rel=0.01)


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
    assert hlo_text.contractions(HLO) == {
        ("bfloat16", "float32", "float32"): 1,
        ("float16", "float16", "float16"): 1,
    }
    assert hlo_text.contractions("") == {}


def kernel(name, *models):
    costs = ",".join(
        f'{{"end_to_end_cycles":1,"exec_time_us":{exec_time},"compute_time_us":{compute},"memory_access_time_us":1,'
        f'"name":"{model}"}}'
        for model, exec_time, compute in models
    )
    return f'  %{name} = bf16[1000]{{0}} fusion(%a, %b), kind=kLoop, backend_config={{"reification_cost":[{costs}]}}\n'


KERNELS = "  %a = bf16[2000]{0} parameter(0)\n  %b = (f32[500]{0}, pred[1000]{0}) parameter(1)\n"


def test_kernels_are_added_up():
    """Matrix products by matrix units (3 us) or memory: 2000 + 4000 + 2000 + 1000 bytes at 1e9 a second are 9 us."""
    product = kernel("p", ("", 70, 60), ("experimental-gemm-cost-model", 80, 3), ("sol", 500, 0))
    other = kernel("o", ("", 9, 8), ("sol", 2, 0))
    unknown = kernel("u", ("", 7, 6))
    assert hlo_text.kernel_seconds(KERNELS + product + other + unknown, 1e12, {}) == pytest.approx(5e-6)
    assert hlo_text.kernel_seconds(KERNELS + product, 1e9, {}) == pytest.approx(9e-6)
    assert hlo_text.kernel_seconds(KERNELS, 1e9, {}) is None


def test_row_kernels_in_triton_take_what_the_memory_needs():
    rows = kernel("r", ("sol", 0.01, 0)).replace('{"reification_cost"', '{"kind":"__triton","reification_cost"')
    assert hlo_text.kernel_seconds(KERNELS + rows, 1e9, {}) == pytest.approx(9e-6)


LIBRARY = """
  %x = bf16[2,8192,2304]{2,1,0} parameter(0)
  %y = bf16[2,8192,768]{2,1,0} parameter(1)
  %c = (f32[2,2304,768]{2,1,0}, s8[4194304]{0}) custom-call(%x, %y), custom_call_target="__cublas$lt$matmul", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_batch_dimensions":["0"]}},\
"reification_cost":[{"end_to_end_cycles":0,"exec_time_us":4864.9,"compute_time_us":0,"name":"sol"}]}
""".replace("\\\n", "")


def test_a_library_product_takes_its_operations_at_the_peak():
    """XLA's table gives it 4.9 ms; 2 x 2 x 8192 x 2304 x 768 operations at 989e12 a second are 58.6 us."""
    assert hlo_text.kernel_seconds(LIBRARY, 4800e9, {"bfloat16": 989e12}) == pytest.approx(58.6e-6, rel=1e-3)
    assert hlo_text.kernel_seconds(LIBRARY, 4800e9, {}) == pytest.approx(4864.9e-6)


COLLECTIVES = """
  %t = (bf16[144,768]{1,0}, s32[4]{0}) parameter(0)
  %s = ((bf16[8,4]{1,0}), (bf16[16,4]{1,0})) all-gather-start(%p), channel_id=1, replica_groups=[8,2]<=[16]
  %d = bf16[16,4]{1,0} all-gather-done(%s)
  %r = f32[8]{0} reduce-scatter(%p), channel_id=2, replica_groups=mesh['a'=4,'b'=4], device_ids=([4,4]T(1,0)) {'b'}
  %again = f32[8]{0} reduce-scatter(%p), channel_id=2, replica_groups=mesh['a'=4,'b'=4] {'b'}
  %sub = f32[8]{0} all-reduce(%p), channel_id=3, replica_groups=mesh['a'=4,'b'=4] {'a','b':(1)2}
  %both = (f32[8]{0}, bf16[4]{0}, f32[]) all-reduce(%p, %q, %z), channel_id=4, replica_groups={{0,1,2,3},{4,5,6,7}}
  %move = bf16[10]{0} collective-permute(%p), channel_id=5, source_target_pairs={{0,1}}
  %loss = f32[] all-reduce(%z), channel_id=6, replica_groups={{0,1}}
"""


def test_collectives_are_read_from_hlo_text():
    """Of two halves the second has the result; one that XLA:TPU repeats in several fusions has one channel."""
    assert {tuple(kind): tuple(traffic) for kind, traffic in hlo_text.collectives(COLLECTIVES).items()} == {
        ("all-gather", "bfloat16", 2): (1, 128, 64),
        ("reduce-scatter", "float32", 4): (1, 32, 96),
        ("all-reduce", "float32", 8): (1, 32, 56),
        ("all-reduce", "float32", 4): (1, 32, 48),
        ("all-reduce", "bfloat16", 4): (1, 8, 12),
        ("collective-permute", "bfloat16", 0): (1, 20, 20),
    }
