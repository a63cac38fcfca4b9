"""Programs as other frameworks write them: complex and resource constants, quantized types, composites, HLO, several
functions, symbolic shapes.
"""

from __future__ import annotations

import struct

import jax
import jax.numpy as jnp
import ml_dtypes
import module_runs
import numpy as np
import pytest
from jax import export

from xla_amp.errors import ModuleError
from xla_amp.stablehlo import autocast, compare, hlo, inspect, ir
from xla_amp.stablehlo.program import dump, parse

RNG = np.random.default_rng(0)
X, W = (RNG.standard_normal(shape).astype(np.float32) for shape in ((4, 8), (8, 8)))


def low_products(module) -> list[tuple[str, str]]:
    return [(left, result) for (left, _, result), n in inspect(module).contractions.items() for _ in range(n)]


# Constants.


@pytest.mark.parametrize("constant", [2 + 1j, np.arange(8) * 1j + 1], ids=["splat", "dense"])
def test_complex_constants_are_kept(constant):
    def function(x, w):
        return jnp.abs((x @ w).astype(jnp.complex64) * jnp.asarray(constant, jnp.complex64))

    text = jax.jit(function).lower(X, W).as_text()
    converted = autocast(text)
    assert low_products(converted) == [("bf16", "f32")]
    (found,) = module_runs.run(converted.module, [X, W])
    np.testing.assert_allclose(found, np.abs((X.astype(np.float64) @ W) * constant), rtol=0.05, atol=0.05)


def resource(values: np.ndarray, element: str) -> str:
    kind = f"tensor<{'x'.join(map(str, values.shape))}x{element}>"
    bits = (struct.pack("<I", 4) + values.tobytes()).hex().upper()
    return f"""module {{ func.func @main() -> {kind} {{
      %w = stablehlo.constant dense_resource<w0> : {kind}
      return %w : {kind} }} }}
    {{-# dialect_resources: {{ builtin: {{ w0: "0x{bits}" }} }} #-}}"""


@pytest.mark.parametrize(
    ("values", "element"),
    [
        (np.arange(6, dtype=np.int32).reshape(2, 3), "i32"),
        (np.arange(6).astype(ml_dtypes.bfloat16), "bf16"),
        (np.array([1, 0, 0, 1, 1, 1, 0, 1, 1, 1], bool), "i1"),
        (np.arange(3) * (1 + 2j), "complex<f64>"),
        (np.float32([7]), "f32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_values_of_resources_reach_the_compiler(values, element):
    (found,) = module_runs.run(ir.parse(resource(values, element)), [])
    np.testing.assert_array_equal(np.asarray(found).reshape(values.shape).astype(values.dtype), values)


def test_weights_in_a_resource_are_narrowed():
    text = resource(W, "f32").replace("@main()", "@main(%x: tensor<4x8xf32>)").replace(
        "return %w : tensor<8x8xf32>",
        "%0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<4x8xf32>, tensor<8x8xf32>) -> "
        "tensor<4x8xf32> return %0 : tensor<4x8xf32>",
    ).replace("-> tensor<8x8xf32> {", "-> tensor<4x8xf32> {")  # fmt: skip
    converted = autocast(text)
    assert low_products(converted) == [("bf16", "f32")]
    assert "dense_resource" not in converted.text()
    assert 0 < compare(text, converted, [X]).outputs[0].error.relative < 0.01
    left_out = text[: text.index("{-#")]
    assert low_products(autocast(left_out)) == [("f32", "f32")]
    with pytest.raises(ModuleError, match="a constant without values: dense_resource<w0"):
        module_runs.run(ir.parse(left_out), [X])


# Types and operations.

QUANTIZED = """func.func @main(%x: tensor<4x8xf32>, %w: tensor<8x8xf32>) -> tensor<4x8xf32> {
  %y = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<4x8xf32>, tensor<8x8xf32>) -> tensor<4x8xf32>
  %q = stablehlo.uniform_quantize %y : (tensor<4x8xf32>) -> tensor<4x8x!quant.uniform<i8:f32, 0.5:0>>
  %k = stablehlo.constant() {value = dense<1> : tensor<8x8xi8>} : () -> tensor<8x8x!quant.uniform<i8:f32, 0.5:0>>
  %p = stablehlo.dot_general %q, %k, contracting_dims = [1] x [0] : (tensor<4x8x!quant.uniform<i8:f32, 0.5:0>>, tensor<8x8x!quant.uniform<i8:f32, 0.5:0>>) -> tensor<4x8x!quant.uniform<i32:f32, 0.25:0>>
  %d = stablehlo.uniform_dequantize %p : (tensor<4x8x!quant.uniform<i32:f32, 0.25:0>>) -> tensor<4x8xf32>
  %z = stablehlo.dot_general %d, %w, contracting_dims = [1] x [0] : (tensor<4x8xf32>, tensor<8x8xf32>) -> tensor<4x8xf32>
  return %z : tensor<4x8xf32> }"""  # noqa: E501 - one operation a line


@pytest.mark.parametrize("kind", ["text", "bytecode", "artifact"])
def test_quantized_programs_are_read_and_quantized_values_left_alone(kind):
    program = parse(dump(parse(QUANTIZED.encode()), kind))
    converted = autocast(program)
    quantized = ("!quant.uniform<i8:f32, 5.000000e-01>", "!quant.uniform<i32:f32, 2.500000e-01>")
    assert sorted(low_products(converted)) == [quantized, ("bf16", "f32"), ("bf16", "f32")]


def test_quantized_programs_are_not_run():
    """XLA:CPU ends the process."""
    with pytest.raises(ModuleError, match=r"XLA cannot run quantized types \(!quant.uniform\)"):
        compare(QUANTIZED, QUANTIZED, [X, W])


COMPOSITE = """module { func.func @main(%x: tensor<4x8xf32>, %w: tensor<8x8xf32>) -> tensor<4x8xf32> {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<4x8xf32>, tensor<8x8xf32>) -> tensor<4x8xf32>
  %1 = stablehlo.composite "my.mlp" %0, %w {decomposition = @mlp} : (tensor<4x8xf32>, tensor<8x8xf32>) -> tensor<4x8xf32>
  return %1 : tensor<4x8xf32> }
func.func private @mlp(%x: tensor<4x8xf32>, %w: tensor<8x8xf32>) -> tensor<4x8xf32> {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<4x8xf32>, tensor<8x8xf32>) -> tensor<4x8xf32>
  %1 = stablehlo.tanh %0 : tensor<4x8xf32>
  return %1 : tensor<4x8xf32> } }"""  # noqa: E501 - one operation a line


@pytest.mark.parametrize("keep_io", [True, False])
def test_a_composite_and_its_decomposition_keep_one_signature(keep_io):
    converted = autocast(COMPOSITE, keep_io=keep_io)
    assert [left for left, _ in low_products(converted)] == ["bf16", "bf16"]
    found = compare(COMPOSITE, converted, [X, W])
    assert 1e-4 < found.outputs[0].error.relative < 0.02


def test_samples_reach_the_decomposition_of_a_composite():
    converted = autocast(COMPOSITE, dtype="float16", policy="gpu", sample_inputs=(X, W), max_error=1e-5)
    kept = [each.function for each in converted.report.operations if each.why.startswith("sample inputs")]
    assert "mlp" in kept


# Several functions.

TWO = """module {
func.func @f(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = call @main(%x) : (tensor<2xf32>) -> tensor<2xf32>
  %1 = stablehlo.add %0, %0 : tensor<2xf32>
  return %1 : tensor<2xf32> }
func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
  %1 = stablehlo.sine %x : tensor<2xf32>
  return %1 : tensor<2xf32> } }"""


@pytest.mark.parametrize(("chosen", "factor"), [("f", 2), ("main", 1), (None, 1)])
def test_a_function_is_chosen_by_name(chosen, factor):
    program = parse(TWO.encode(), function=chosen)
    x = np.float32([1, 2])
    (found,) = module_runs.run(program.module, [x])
    np.testing.assert_allclose(found, factor * np.sin(x), rtol=1e-6)
    assert compare(program, autocast(program), [x]).agrees()
    assert dump(program, "text") == dump(parse(TWO.encode()), "text")


def test_functions_are_listed_where_none_is_main():
    both = TWO.replace("@main", "@g").encode()
    with pytest.raises(ModuleError, match="public functions: f, g; choose one: --function NAME"):
        parse(both)
    with pytest.raises(ModuleError, match="no public function 'h'; public functions: f, g"):
        parse(both, function="h")
    assert ir.signature(parse(both, function="g").module).inputs[0] == ((2,), "f32")


# Symbolic shapes.


@pytest.fixture(scope="module")
def symbolic():
    (rows,) = export.symbolic_shape("b")

    def function(x, w, bias):
        return jnp.tanh(x @ w) @ w + bias, jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, length=3)[0]

    kinds = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((rows, 8), (8, 8), (rows, 8))]
    return parse(bytes(export.export(jax.jit(function))(*kinds).serialize()))


def test_samples_refine_symbolic_shapes(symbolic):
    x, ones = np.float32([1, -1] * 4), (lambda *shape: np.ones(shape, np.float32))
    samples = [(size * x * ones(rows, 8), ones(8, 8), ones(rows, 8)) for rows, size in ((3, 1), (5, np.float32(1e5)))]
    small, both = (autocast(symbolic, dtype="float16", policy="gpu", sample_inputs=s) for s in (samples[0], samples))
    assert [left for left, _ in low_products(small)] == ["f16"] * 3
    overflow = "x, before and in the loop, overflows on the second sample, and x @ w would be NaN"
    assert sorted(left for left, _ in low_products(both)) == ["f16", "f32", "f32"], overflow
    assert compare(symbolic, small, samples[0]).agrees()
    called = export.deserialize(bytearray(dump(small.program, "export"))).call(*samples[1])
    assert [each.shape for each in called] == [(5, 8), (5, 8)]


def test_samples_that_do_not_determine_the_shapes_of_a_symbolic_program(symbolic):
    huge = [np.full(shape, 1e30, np.float32) for shape in ((2, 8), (8, 8), (1, 8))]
    with pytest.raises(ModuleError, match="the samples' shapes do not determine the program's: "):
        compare(symbolic, symbolic, huge)


# HLO.


@pytest.fixture(scope="module")
def lowered():
    return jax.jit(lambda x, w: jnp.tanh(x @ w) @ w).lower(X, W)


def proto_of(lowered) -> bytes:
    return bytes(lowered.compiler_ir("hlo").as_serialized_hlo_module_proto())


def wrapped(proto: bytes) -> bytes:
    """An ``HloProto`` around a module."""
    size, head = len(proto), b"\n"
    while size > 127:
        head, size = head + bytes([size & 127 | 128]), size >> 7
    return head + bytes([size]) + proto


@pytest.mark.parametrize(
    ("form", "written"),
    [
        ("HLO text", lambda lowered: lowered.as_text(dialect="hlo").encode()),
        ("HLO proto", proto_of),
        ("HLO proto", lambda lowered: wrapped(proto_of(lowered))),
    ],
    ids=["text", "proto", "proto of a dump"],
)
def test_hlo_is_converted(lowered, form, written):
    program = parse(written(lowered))
    assert (program.source, program.format) == (form, "text")
    converted = autocast(program)
    assert low_products(converted) == low_products(autocast(lowered))
    assert compare(lowered, converted, [X, W]).agrees()


def test_hlo_that_is_no_stablehlo_says_which_form_to_give(lowered):
    optimized = jax.jit(lambda x: jnp.tanh(x) * jnp.exp(x)).lower(X).compile().as_text()
    with pytest.raises(ModuleError, match=r"StableHLO has no mhlo\.fusion.*; give the program before optimizations"):
        autocast(optimized)
    with pytest.raises(ModuleError, match="HLO proto that JAX cannot convert"):
        parse(proto_of(lowered)[:400])
    with pytest.raises(ModuleError, match=r"HLO text that JAX cannot convert.*: error: expects name"):
        autocast("HloModule m\nENTRY")


@pytest.mark.parametrize("data", [b"\nmodule {}", b"", b"\n\n", b"ML\xefR\n\x01"])
def test_what_is_no_hlo(data):
    assert hlo.format_of(data) is None


# Errors.

PLAIN = "func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {\n  return %x : tensor<4xf32>\n}\n"
TEXT = "// caf\u00e9\n" + PLAIN
MLIR = "not a StableHLO module: "


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty; expected a StableHLO module"),
        (b" \n", "empty; expected a StableHLO module"),
        (b"hello\nworld", f"{MLIR}line 1, column 1: custom op 'hello' is unknown"),
        (b"module {\n  func.func @main() { stablehlo.tahn }\n}", f"{MLIR}line 2, column 23: custom op 'stablehlo.tahn"),
        (b"func.func @main() { return 1 }", MLIR),
        (TWO[:150].encode(), rf"{MLIR}line \d+, column \d+: expected"),
        (TWO.replace("add %0, %0", "add %0, %7").encode(), f"{MLIR}line 4, column 26: use of undeclared SSA value"),
        (QUANTIZED.replace("f32> {", "f64> {").encode(), rf"{MLIR}line 8, column 3: .*doesn't match"),
        (dump(parse(TWO.encode()), "bytecode")[:200], f"{MLIR}attempting to parse"),  # bytecode has no lines
        (b"ML\xefRnothing", MLIR),
        (b"module {}", "expected a function @main or exactly one public function; public functions: none"),
        (b"\x7fELF\xff\xfe", "neither MLIR text in UTF-8, MLIR bytecode nor a portable artifact, and not a jax"),
        *((TEXT.encode(each), "neither MLIR text in UTF-8") for each in ("utf-16", "utf-16-le", "utf-16-be")),
        *((TEXT.encode(each), "neither MLIR text in UTF-8") for each in ("utf-32", "latin-1")),
    ],
)  # fmt: skip
def test_damage_is_one_clear_error_with_its_place_and_reason(data, reason):
    with pytest.raises(ModuleError, match=f"^bad: {reason}") as raised:
        parse(data, "bad")
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_text_in_utf_8_may_have_a_byte_order_mark(encoding):
    assert parse(TEXT.encode(encoding), "program").format == "text"
