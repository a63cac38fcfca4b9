"""Comparing programs: the float64 version against JAX's own float64, errors against errors computed by hand."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from xla_amp.common import compiling
from xla_amp.errors import FileError, ModuleError
from xla_amp.stablehlo import autocast, execution, ir, samples
from xla_amp.tools.inspect import comparison, segments, widen

RNG = np.random.default_rng(0)
X, W = (RNG.standard_normal(shape).astype(np.float32) for shape in ((4, 8), (8, 8)))
KEY = np.array([0, 7], dtype=np.uint32)


def scanned(x, w):
    return jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), h.sum()), x, length=3)


def branched(x, w):
    return jax.lax.cond(x.sum() > 0, lambda h: jnp.sort(h @ w), lambda h: 2 * h, x)


PROGRAMS = {
    "dot": lambda x, w: x @ w,
    "dot with an algorithm": lambda x, w: jnp.dot(x, w, precision=jax.lax.DotAlgorithmPreset.BF16_BF16_F32),
    "casts": lambda x, w: (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32),
    "function": lambda x, w: jax.nn.gelu(jax.nn.softmax(x @ w)),
    "scan": scanned,
    "cond": branched,
    "while": lambda x, w: jax.lax.while_loop(lambda h: jnp.abs(h).max() > 0.1, lambda h: h * 0.5, x @ w),
    "gradient": jax.grad(lambda x, w: jnp.sum(jnp.tanh(x @ w) ** 2), argnums=(0, 1)),
    "scatter and gather": lambda x, w: x.at[jnp.array([0, 2])].add(w[:2]),
    "argmax": lambda x, w: (jnp.argmax(x @ w, axis=1), jnp.max(x @ w, axis=1)),
    "complex": lambda x, w: jnp.abs(jnp.fft.fft(x)),
    "a large constant": lambda x, w: x + jnp.asarray(np.arange(32, dtype=np.float32).reshape(4, 8) / 7),
}

ROUNDED = ("function", "a large constant")
"""Programs with constants that are already rounded to float32."""


def module_of(function, *arguments):
    return ir.parse(jax.jit(function, keep_unused=True).lower(*arguments).as_text())


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_float64_version_gives_what_jax_gives_in_float64(name):
    """The casts of the program are no-ops in the float64 version, as in the JAX function."""
    wide = comparison.Runs(module_of(PROGRAMS[name], X, W), wide=True)([X, W])
    plain = PROGRAMS["dot" if name in ("dot with an algorithm", "casts") else name]
    with jax.enable_x64(True):
        expected = jax.tree.leaves(jax.jit(plain)(X.astype(np.float64), W.astype(np.float64)))
    for found, value in zip(wide, expected, strict=True):
        assert found.dtype in (np.float64, np.int32)
        np.testing.assert_allclose(found, value, rtol=1e-6 if name in ROUNDED else 1e-12)


def test_random_bits_are_the_same_in_float64():
    """Operations on bits keep their types: another width would change the values."""
    module = module_of(lambda key, x: x + jax.random.uniform(key, (4, 8)), KEY, X)
    (found,) = comparison.Runs(module, wide=True)([KEY, X])
    np.testing.assert_allclose(found, X + np.asarray(jax.random.uniform(KEY, (4, 8))), rtol=1e-6)


def test_library_calls_stay_and_what_surrounds_them_is_wide():
    module = module_of(lambda x, w: jnp.linalg.cholesky(w @ w.T + 8 * jnp.eye(8)) * 3.0, X, W)
    (found,) = comparison.Runs(module, wide=True)([X, W])
    expected = 3 * np.linalg.cholesky(W.astype(np.float64) @ W.T + 8 * np.eye(8))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_no_float64_version_of_a_function_without_a_body():
    text = """func.func private @f(tensor<2xf32>) -> tensor<2xf32>
    func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
      %0 = call @f(%x) : (tensor<2xf32>) -> tensor<2xf32>
      return %0 : tensor<2xf32> }"""
    with pytest.raises(ModuleError, match="function f has no body"):
        widen.widened(ir.parse(text))


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
    assert output.b.relative == pytest.approx(expected, rel=0.5)  # XLA may leave the last rounding out
    assert output.a.relative < 1e-6
    assert (output.a.nonfinite, output.b.nonfinite) == (0, 0)
    assert found.unmatched == (0, 0)


def test_operations_are_matched_across_casts(found):
    assert [each.operation for each in found.operations] == ["dot_general", "tanh", "reduce"]
    dot = found.operations[0]
    assert (dot.type_a, dot.type_b) == ("f32[4,8]", "bf16[4,8]")
    assert 2**-10 < dot.b.relative < 2**-7  # half a unit in the last place of bfloat16 is 2^-9
    assert dot.a.relative < 1e-6
    assert found.worst(1)[0].b.relative == max(each.b.relative for each in found.operations)


def test_agreement_is_a_matter_of_tolerance(found):
    assert found.agrees()
    assert not found.agrees(1e-5)
    (output,) = found.outputs
    broken = dataclasses.replace(found, outputs=(output._replace(b=output.b._replace(nonfinite=1)),))
    assert not broken.agrees()


def test_as_plain_data(found):
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["outputs"][0]["b"]["relative"] == found.outputs[0].b.relative
    assert [each["operation"] for each in plain["operations"]] == ["dot_general", "tanh", "reduce"]


def test_values_inside_called_functions_and_every_result_of_a_loop_are_seen():
    function = jax.jit(lambda x, w: scanned(jax.nn.relu(jax.nn.relu(x) - 1), w))
    module = module_of(function, X, W)
    operations = comparison.compare(module, module, [X, W]).operations
    names = [each.operation for each in operations]
    assert names.count("maximum") == 2  # of relu, a separate function in the module
    assert names.count("while") >= 2
    assert max(each.a.relative for each in operations) < 1e-5


def test_a_function_that_calls_itself_is_refused():
    text = """func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
      %0 = call @main(%x) : (tensor<2xf32>) -> tensor<2xf32>
      return %0 : tensor<2xf32> }"""
    with pytest.raises(ModuleError, match="function main calls itself"):
        widen.inlined(ir.parse(text))


def test_overflow_in_the_low_program_is_counted():
    big = np.full((4, 8), 300.0, dtype=np.float32)

    def half(x, w):
        return (x.astype(jnp.float16) * x.astype(jnp.float16)).astype(jnp.float32) @ w

    compared = comparison.compare(module_of(lambda x, w: (x * x) @ w, big, W), module_of(half, big, W), [big, W])
    assert compared.outputs[0].b.nonfinite == 32
    assert not compared.agrees()
    assert compared.worst(1)[0].b.nonfinite == 32


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.full) for name in ("function", "cond", "gradient")),
        *("scan", "scatter and gather", "a large constant"),
    ],
)
def test_segments_of_one_operation_give_the_same_errors(monkeypatch, name):
    module = module_of(PROGRAMS[name], X, W)
    low = autocast(module)
    whole = comparison.compare(module, low, [X, W]).operations
    monkeypatch.setattr(segments, "_LENGTH", 1)
    apart = comparison.compare(module, low, [X, W]).operations
    assert [(each.operation, each.location) for each in apart] == [(each.operation, each.location) for each in whole]
    for one, other in zip(apart, whole, strict=True):
        assert one.b.relative == pytest.approx(other.b.relative, rel=0.5, abs=1e-6)


def test_the_reference_stays_in_float64_from_segment_to_segment(monkeypatch):
    """Otherwise float32 would seem to have the errors of one operation only."""
    module = module_of(lambda x, w: functools.reduce(lambda h, _: h * 1.1 + h, range(10), x), X, W)
    whole = comparison.compare(module, module, [X, W]).operations
    monkeypatch.setattr(segments, "_LENGTH", 1)
    apart = comparison.compare(module, module, [X, W]).operations
    assert apart[-1].a.relative == pytest.approx(whole[-1].a.relative, rel=0.2) != 0


def test_no_program_of_a_long_comparison_is_long(monkeypatch):
    """XLA's time to compile grows faster than a program."""
    module = module_of(lambda x, w: functools.reduce(lambda h, _: jnp.tanh(h @ w), range(40), x), X, W)
    lengths = []
    compiled = execution.compile_module

    def counted(module, device=None, options=None):
        lengths.append(sum(1 for _ in ir.operations(module.operation)))
        return compiled(module, device, options)

    monkeypatch.setattr(segments, "_LENGTH", 10)
    monkeypatch.setattr(execution, "compile_module", counted)
    assert len(comparison.compare(module, module, [X, W]).operations) == 80
    assert max(lengths[3:]) < 20
    assert len(lengths) == 3 + 3 * 8


def test_large_programs_are_compiled_as_usual(monkeypatch):
    module = module_of(lambda x, w: x @ w @ w, X, W)
    chosen, compiled = [], execution.compile_module
    monkeypatch.setattr(
        execution,
        "compile_module",
        lambda module, device, options: chosen.append(options) or compiled(module, device, options),
    )
    for least in (work := 2 * 2 * 4 * 8 * 8, work + 1):
        monkeypatch.setattr(compiling, "QUICK_FLOPS", least)
        np.testing.assert_allclose(comparison.Runs(module)([X, W])[0], X @ W @ W, rtol=1e-5, atol=1e-5)
    assert chosen[0] == {}
    assert chosen[1]["xla_backend_optimization_level"] == 0


def test_narrowed_arguments_take_the_same_samples():
    narrow = module_of(lambda x, w: (x @ w).astype(jnp.float32), *(each.astype(jnp.bfloat16) for each in (X, W)))
    compared = comparison.compare(module_of(lambda x, w: x @ w, X, W), narrow, [X, W], operations=False)
    assert 1e-4 < compared.outputs[0].b.relative < 2**-6
    assert compared.operations == ()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda x: x[:2] @ x.T, r"different shapes: \[\(4, 8\)\] and \[\(2, 4\)\]"),
        (lambda x: x[0, 0] * jnp.ones((4, 8), jnp.int32), None),
    ],
)
def test_programs_that_cannot_be_compared(other, message):
    a, b = module_of(lambda x: x * 2, X), module_of(other, X)
    if message is None:
        assert comparison.compare(a, b, operations=False).outputs[0].type == "f32"
        return
    with pytest.raises(ModuleError, match=message):
        comparison.compare(a, b)


def test_programs_for_several_devices_are_refused():
    one = module_of(full, X, W)
    four = ir.parse(ir.text(one).replace("num_partitions = 1", "num_partitions = 4"))
    with pytest.raises(ModuleError, match="B is for 4 devices; programs are compared on one"):
        comparison.compare(one, four)


def site(name, *, bytes=4):
    return widen.Site(name, "[1]", "f32", "", (), "", bytes)


@pytest.mark.parametrize("exact", [3000, 0], ids=["few", "many"])
def test_matching_keeps_the_order(monkeypatch, exact):
    monkeypatch.setattr(comparison, "_EXACT", exact)
    a, b = ([site(name) for name in names] for names in ("abcdefgh", "abxdyefgh"))
    assert list(comparison.matched(a, b)) == [(0, 0), (1, 1), (3, 3), (4, 5), (5, 6), (6, 7), (7, 8)]
    assert list(comparison.matched(a, a)) == [(n, n) for n in range(8)]
    assert list(comparison.matched(a[:2], a)) == [(0, 0), (1, 1)]
    assert list(comparison.matched([], a)) == []


def test_long_programs_of_the_same_operations_are_matched_at_once():
    """A matcher with quadratic time would need hours."""
    a = [site("tanh")] * 50_000 + [site("dot")] + [site("tanh")] * 50_000
    assert len(list(comparison.matched(a, [*a[:50_000], *a[50_001:]]))) == 100_000


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


def test_bfloat16_survives_numpys_files(tmp_path):
    np.savez(tmp_path / "low.npz", X.astype(ml_dtypes.bfloat16))
    module = module_of(lambda x: x * 2, X.astype(ml_dtypes.bfloat16))
    (array,) = samples.fitted(samples.read_samples(tmp_path / "low.npz"), module)
    np.testing.assert_array_equal(array, X.astype(ml_dtypes.bfloat16))


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
    assert found.outputs[0].b.relative == pytest.approx(error, rel=1e-3)
    assert [each.operation for each in found.operations] == ["dot_general", "transpose"]
