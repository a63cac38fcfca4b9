"""`compare`: differences of results on the same inputs, by NumPy; verdicts; samples."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from xla_amp import cli
from xla_amp.errors import FileError, ModuleError
from xla_amp.stablehlo import ir
from xla_amp.stablehlo.api import autocast
from xla_amp.stablehlo.measure import comparison, samples

RNG = np.random.default_rng(0)
X, W = (RNG.standard_normal(shape).astype(np.float32) for shape in ((4, 8), (8, 8)))
KEY = np.array([0, 7], dtype=np.uint32)


def module_of(function, *arguments):
    return ir.parse(jax.jit(function, keep_unused=True).lower(*arguments).as_text())


def low(x, w):
    return jnp.tanh((x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32)).sum(0)


def full(x, w):
    return jnp.tanh(x @ w).sum(0)


@pytest.fixture(scope="module")
def found():
    return comparison.compare(module_of(full, X, W), module_of(low, X, W), [X, W])


def test_errors_of_results_are_those_of_numpy(found):
    exact = np.tanh(X.astype(np.float64) @ W).sum(0)
    product = X.astype(ml_dtypes.bfloat16).astype(np.float64) @ W.astype(ml_dtypes.bfloat16).astype(np.float64)
    rounded = np.tanh(product.astype(ml_dtypes.bfloat16).astype(np.float64)).sum(0)
    expected = np.linalg.norm(rounded - exact) / np.linalg.norm(exact)
    (output,) = found.outputs
    assert output.error.relative == pytest.approx(expected, rel=0.5)  # XLA may leave the last rounding out
    assert output.error.nonfinite == 0
    assert 0 < output.rounding < 1e-6


def test_agreement_is_a_matter_of_tolerance(found):
    assert found.agrees()
    assert not found.agrees(1e-5)
    (output,) = found.outputs
    broken = dataclasses.replace(found, outputs=(output._replace(error=output.error._replace(nonfinite=1)),))
    assert not broken.agrees()


def attention(parameters, x):
    query = x @ parameters["query"]
    key = x @ parameters["key"] + parameters["key_bias"]
    weights = jax.nn.softmax(query @ key.T / 4.0)
    return jnp.sum((weights @ x) ** 2)


def test_a_gradient_that_is_only_rounding_is_not_judged_unless_it_is_not_finite():
    made = np.random.default_rng(0)
    parameters = {name: made.standard_normal((16, 16), np.float32) / 4 for name in ("query", "key")}
    parameters["key_bias"] = made.standard_normal(16, np.float32)
    program = module_of(jax.grad(attention), parameters, made.standard_normal((8, 16), np.float32))
    found = comparison.compare(program, autocast(program).module)
    (skipped,) = [each for each in found.outputs if not each.judged]
    assert skipped.name == "result['key_bias']"
    assert skipped.error.relative > 0.5
    assert found.agrees(0.05)
    assert "result['key_bias']: not judged: it is rounding error in float32 already" in " ".join(str(found).split())
    module = ir.parse(ir.text(program))
    last = list(ir.entry(module).regions[0].blocks[0].operations)[-1].operation
    with module.context, ir.mlir().Location.unknown(), ir.mlir().InsertionPoint(last):
        bias = last.operands[1]  # sorted by name: key, key_bias, query
        zero = ir.dialect().subtract(bias, bias)
        last.operands[1] = ir.dialect().divide(zero, zero)
    assert not comparison.compare(program, module).agrees()


def test_nan_and_another_infinity_are_no_agreement(tmp_path, capsys):
    nan = ir.text(module_of(lambda x: (x + jnp.nan, x), X))
    found = comparison.compare(nan, nan)
    assert np.isnan(found.outputs[0].error.relative)
    assert not found.agrees()
    (tmp_path / "a.mlir").write_text(nan)
    assert cli.main(["compare", str(tmp_path / "a.mlir"), str(tmp_path / "a.mlir")]) == 1
    assert "none is finite in A and in B" in " ".join(capsys.readouterr().out.split())
    up, down = (module_of(lambda x, sign=sign: jnp.stack([x[0, 0], sign * jnp.inf]), X) for sign in (1, -1))
    assert comparison.compare(up, up).agrees()
    assert not comparison.compare(up, down).agrees()


def test_a_program_without_a_result_is_an_error(tmp_path, capsys):
    text = "func.func @main(%x: tensor<4xf32>) {\n  return\n}\n"
    with pytest.raises(ModuleError, match="gives no result: there is nothing to compare"):
        comparison.compare(text, text)
    (tmp_path / "a.mlir").write_text(text)
    assert cli.main(["compare", str(tmp_path / "a.mlir"), str(tmp_path / "a.mlir")]) == 1
    assert "gives no result" in capsys.readouterr().err


def test_the_first_named_result_that_differs_is_named():
    def results(scale):
        return module_of(lambda x: {"a": x, "b": scale * x, "c": 2 * scale * x}, X)

    different = comparison.compare(results(1.0), results(1.5))
    assert different.first_difference().name == "result['b']"
    assert "2 of 3 differ at a tolerance of 0.05; the first is result['b']" in str(different)
    text = ir.text(results(1.5)).replace("jax.result_info = \"result['b']\"", "")
    nameless = comparison.compare(ir.text(results(1.0)).replace("jax.result_info = \"result['b']\"", ""), text)
    assert nameless.first_difference().name == "result['c']"


RECURSIVE = """
func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %h = call @f(%x) : (tensor<4xf32>) -> tensor<4xf32>
  return %h : tensor<4xf32>
}
func.func private @f(%x: tensor<4xf32>) -> tensor<4xf32> {
  %t = stablehlo.tanh %x : tensor<4xf32>
  %h = call @g(%t) : (tensor<4xf32>) -> tensor<4xf32>
  return %h : tensor<4xf32>
}
func.func private @g(%x: tensor<4xf32>) -> tensor<4xf32> {
  %h = call @f(%x) : (tensor<4xf32>) -> tensor<4xf32>
  return %h : tensor<4xf32>
}
"""


def test_functions_that_call_each_other_are_an_error():
    with pytest.raises(ModuleError, match="functions that call themselves, which XLA does not run: f -> g -> f"):
        comparison.compare(RECURSIVE, RECURSIVE)


def test_arguments_that_no_machine_holds():
    kind = "tensor<4000000x8000000xf32>"
    text = f"func.func @main(%x: {kind}) -> {kind} {{\n  return %x : {kind} }}"
    with pytest.raises(ModuleError, match=r"f32\[4000000,8000000\]: this machine has too little memory"):
        comparison.compare(text, text)


def test_narrowed_arguments_take_the_same_samples():
    narrow = module_of(lambda x, w: (x @ w).astype(jnp.float32), *(each.astype(jnp.bfloat16) for each in (X, W)))
    compared = comparison.compare(module_of(lambda x, w: x @ w, X, W), narrow, [X, W])
    assert 1e-4 < compared.outputs[0].error.relative < 2**-6


def test_programs_that_cannot_be_compared():
    one = module_of(full, X, W)
    four = ir.parse(ir.text(one).replace("num_partitions = 1", "num_partitions = 4"))
    with pytest.raises(ModuleError, match="B is for 4 devices; programs are compared on one"):
        comparison.compare(one, four)
    with pytest.raises(ModuleError, match=r"different shapes: \[\(4, 8\)\] and \[\(2, 4\)\]"):
        comparison.compare(module_of(lambda x: x * 2, X), module_of(lambda x: x[:2] @ x.T, X))


def test_samples_fit_or_say_why(tmp_path):
    module = module_of(lambda x, key: x * key[0], X, KEY)
    for array, kind in zip(samples.random_inputs(module, 3), ("float32", "uint32"), strict=True):
        assert array.dtype == kind
    np.savez(tmp_path / "ok.npz", X.astype(np.float64), KEY.astype(np.int64))
    first, second = samples.fitted(samples.read_samples(tmp_path / "ok.npz"), module)
    assert (first.dtype, second.dtype) == (np.float32, np.uint32)
    with pytest.raises(ModuleError, match=r"it takes 2 arguments \(f32\[4,8\], ui32\[2\]\), the samples are 1 arrays"):
        samples.fitted([X], module)
    with pytest.raises(ModuleError, match=r"argument 0: expected f32\[4,8\], the sample is float32\[8, 8\]"):
        samples.fitted([W, KEY], module)
    with pytest.raises(ModuleError, match=r"argument 1: expected ui32\[2\], the sample is float32\[2\]"):
        samples.fitted([X, KEY.astype(np.float32)], module)


def test_files_that_hold_no_samples(tmp_path):
    (tmp_path / "text.npz").write_text("no")
    np.save(tmp_path / "one.npy", X)
    np.savez(tmp_path / "objects.npz", np.array([{}], dtype=object))
    for name, message in (("text.npz", "not an .npz"), ("one.npy", "one array"), ("objects.npz", "not an .npz"),
                          ("absent.npz", "No such file")):  # fmt: skip
        with pytest.raises((FileError, ModuleError), match=message):
            samples.read_samples(tmp_path / name)


def test_random_values_need_shapes():
    text = "func.func @main(%x: tensor<?xf32>) -> tensor<?xf32> { return %x : tensor<?xf32> }"
    with pytest.raises(ModuleError, match=r"argument 0 has no fixed shape.*give an \.npz"):
        samples.random_inputs(ir.parse(text))


@pytest.mark.parametrize("low", [jnp.bfloat16, jnp.float16])
def test_products_that_the_cpu_cannot_run_are_compared(low):
    """A weight's gradient, summed over batch and tokens, and transposed."""

    def gradient(dtype, x, dy):
        over = ((0, 1), (0, 1)), ((), ())
        product = jax.lax.dot_general(x.astype(dtype), dy.astype(dtype), over, preferred_element_type=jnp.float32)
        return jnp.transpose(product)

    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in ((2, 5, 8), (2, 5, 6))]
    programs = [module_of(functools.partial(gradient, dtype), *arrays) for dtype in (jnp.float32, low)]
    found = comparison.compare(*programs, arrays)
    rounded = [each.astype(low).astype(np.float64) for each in arrays]
    exact = np.einsum("bti,bto->oi", *arrays, dtype=np.float64)
    error = np.linalg.norm(np.einsum("bti,bto->oi", *rounded) - exact) / np.linalg.norm(exact)
    assert found.outputs[0].error.relative == pytest.approx(error, rel=1e-3)
