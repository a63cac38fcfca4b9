"""Single rules of the pass on small modules: the dtype of each operation, and the resulting module."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import module_runs
import numpy as np
import pytest
from jax import lax

from xla_amp.common import events
from xla_amp.errors import ModuleError, PolicyError, RuleWarning, UnsupportedDtypeError
from xla_amp.jax import autocast as jax_autocast
from xla_amp.policy.op_catalog import catalogue
from xla_amp.stablehlo import autocast, ir
from xla_amp.stablehlo.converted import Converted
from xla_amp.stablehlo.op_table import table
from xla_amp.stablehlo.passes.canonicalize import untranspose
from xla_amp.stablehlo.passes.clone_functions import SMALL

ONE = "(tensor<8x8xf32>) -> tensor<8x8xf32>"
DOT = "contracting_dims = [1] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>"


def main(body: str, *, arguments: str = "%x: tensor<8x8xf32>, %w: tensor<8x8xf32>", more: str = "") -> str:
    """A module whose entry function returns ``%out``, of 4 x 4 float32."""
    return f"""
func.func @main({arguments}) -> tensor<8x8xf32> {{
  {body}
  return %out : tensor<8x8xf32>
}}
{more}
"""


def runs_in(converted: Converted, operation: str) -> list[str]:
    """Compute dtypes of the operations with one name, in program order."""
    return [each.after for each in converted.report.operations if each.operation == operation]


def why(converted: Converted, operation: str) -> str:
    return next(each.why for each in converted.report.operations if each.operation == operation)


# Propagation.

BETWEEN = [
    # (operation between two dots on %a, compute dtype, words of the reason)
    ("%b = stablehlo.tanh %a : tensor<8x8xf32>", "tanh", "float32", "between products"),
    ("%b = stablehlo.multiply %a, %x : tensor<8x8xf32>", "multiply", "float32", ""),
    ("%b = stablehlo.subtract %a, %a : tensor<8x8xf32>", "subtract", "bfloat16", "between two low"),
    ("%b = stablehlo.multiply %a, %a : tensor<8x8xf32>", "multiply.square", "float32", ""),
    (f"%b = stablehlo.transpose %a, dims = [1, 0] : {ONE}", "transpose", "bfloat16", ""),
    ("%b = stablehlo.exponential %a : tensor<8x8xf32>", "exponential", "float32", "range"),
    ("%b = stablehlo.rsqrt %a : tensor<8x8xf32>", "rsqrt", "float32", ""),
    ("%b = stablehlo.add %a, %x : tensor<8x8xf32>", "add", "float32", ""),
    ("%b = stablehlo.cholesky %a, lower = true : tensor<8x8xf32>", "cholesky", "float32", "condition number"),
    ("%b = chlo.erf_inv %a : tensor<8x8xf32> -> tensor<8x8xf32>", "chlo.erf_inv", "float32", ""),
    ("%b = chlo.lgamma %a : tensor<8x8xf32> -> tensor<8x8xf32>", "chlo.lgamma", "float32", "special function"),
    ("%b = chlo.bessel_i1e %a : tensor<8x8xf32> -> tensor<8x8xf32>", "chlo.bessel_i1e", "float32", ""),
    (f"%b = stablehlo.custom_call @mine(%a) : {ONE}", "custom_call.mine", "float32", "not in the"),
    (f'%b = stablehlo.composite "my.gelu" %a {{decomposition = @inner}} : {ONE}', "composite", "float32", "not in the"),
]
INNER = """func.func private @inner(%a: tensor<8x8xf32>) -> tensor<8x8xf32> {
  %b = stablehlo.sine %a : tensor<8x8xf32>
  return %b : tensor<8x8xf32>
}"""


@pytest.mark.parametrize(("line", "name", "dtype", "reason"), BETWEEN, ids=[row[1] for row in BETWEEN])
def test_between_two_contractions(line: str, name: str, dtype: str, reason: str) -> None:
    body = f"%a = stablehlo.dot_general %x, %w, {DOT}\n{line}\n%out = stablehlo.dot_general %b, %w, {DOT}"
    converted = autocast(main(body, more=INNER))
    assert runs_in(converted, name) == [dtype]
    assert reason in why(converted, name)
    assert runs_in(converted, "dot_general") == ["bfloat16", "bfloat16"]
    assert "@inner(%arg0: tensor<8x8xf32>)" in converted.text()


def test_deny_goes_forward_through_infer_and_stops_at_allow() -> None:
    converted = autocast(
        main(
            f"""%a = stablehlo.dot_general %x, %w, {DOT}
            %e = stablehlo.exponential %a : tensor<8x8xf32>
            %t = stablehlo.transpose %e, dims = [1, 0] : (tensor<8x8xf32>) -> tensor<8x8xf32>
            %m = stablehlo.subtract %t, %a : tensor<8x8xf32>
            %b = stablehlo.dot_general %m, %w, {DOT}
            %n = stablehlo.negate %b : tensor<8x8xf32>
            %out = stablehlo.dot_general %n, %w, {DOT}"""
        )
    )
    assert runs_in(converted, "subtract") == ["float32"]
    assert "follows an operation that stays" in why(converted, "subtract")
    assert runs_in(converted, "transpose") == ["float32"]
    assert runs_in(converted, "negate") == ["bfloat16"]


FAR = jnp.linspace(69000.0, 71000.0, 8)
"""Numbers that float16 cannot hold; of ``(h, w, vector)``, `h` is 8 x 16, `w` 16 x 6, a bias has 6 elements."""
NO_BIAS = {
    "of rows": lambda h, w, v: v[:, None] + h @ w,
    "a factor": lambda h, w, v: (h @ w) * v[:6],
    "a divisor": lambda h, w, v: (h @ w) / v[:6],
    "subtracted": lambda h, w, v: v[:6] - h @ w,
    "computed": lambda h, w, v: h @ w + jnp.tanh(h[0, :6]) * 7e4,
    "computed, in a loop": lambda h, w, v: lax.scan(lambda c, b: (c, h @ w + b), 0.0, jnp.tanh(h[:2, :6]) * 7e4)[1],
    "of a matrix": lambda h, w, v: h @ w + (v[:, None] * jnp.ones(6)),
    "a scalar": lambda h, w, v: h @ w + v[0],
    "no product": lambda h, w, v: jnp.tanh(h @ w) + v[:6],
    "of scores": lambda h, w, v: jnp.tanh(h) @ jnp.tanh(h).T + v,
}

BIASES = {
    "a layer": lambda h, w, b: h @ w + b,
    "from the left": lambda h, w, b: b + h @ w,
    "a row": lambda h, w, b: h @ w + b[None],
    "spread": lambda h, w, b: h @ w + jnp.broadcast_to(b, (8, 6)),
    "a sum of products": lambda h, w, b: h @ w + jnp.tanh(h) @ w + b,
    "two": lambda h, w, b: h @ w + b + b,
    "einsum": lambda h, w, b: jnp.einsum("bd,dh->bh", h, w) + b,
    "mapped": lambda h, w, b: jax.vmap(lambda x: w.T @ x + b)(h),
    "an ensemble": lambda h, w, b: jax.vmap(lambda w, b: h @ w + b)(w.reshape(2, 16, 3), b.reshape(2, 3)),
    "a loop": lambda h, w, b: lax.scan(lambda c, b: (c, h @ w + b), 0.0, b[None])[1],
    "one feature": lambda h, w, b: h @ w[:, :1] + b[:1],
}
BESIDE = {
    **BIASES,
    **NO_BIAS,
    "zeros": lambda h, w, b: jnp.zeros((8, 6)) + h @ w,
    "a target": lambda h, w, b: h @ w + b[:6] - h[:, :6],
    "read by a logarithm": lambda h, w, b: (2 * (p := jnp.tanh(h @ w)), jnp.log(1.01 - jnp.abs(p))),
    "squared, read by a logarithm": lambda h, w, b: (2 * (p := jnp.tanh(h @ w)), jnp.log(1.01 - p * p)),
    "a divisor near 1": lambda h, w, b: (2 * (p := jnp.tanh(h @ w)), h[:, :6] / (1.01 - p)),
    "a sum of exponentials": lambda h, w, b: (2 * (p := jnp.tanh(h @ w)), 1 / jnp.exp(p).sum()),
    "a number": lambda h, w, b: (1 - 1e-6) * (h @ w),
    "a power of two": lambda h, w, b: (h @ w) * 0.125 / 2,
    "a sum with a number": lambda h, w, b: 272.0 + h @ w,
    "a product of two": lambda h, w, b: (h @ w) * h[:, :6],
    "large, float16": lambda h, w, b: (h @ w) * 256,
    "divided, float16": lambda h, w, b: (h @ w) / 3e4,
    "added, float16": lambda h, w, b: h @ w - 6e4,
    "a scale, float16": lambda h, w, b: (h @ w) * 128**-0.5 / 255 / 0.07 * 0.044715 / 0.9,
    "a far bound, float16": lambda h, w, b: 2 * jnp.clip(h @ w, -1e4, 1e4),
    "a bound": lambda h, w, b: 2 * jnp.minimum(h @ w, 1 - 1e-6),
    "a far bound": lambda h, w, b: 2 * jnp.clip(h @ w, -0.1, 5.5),
    "a mask": lambda h, w, b: 2 * jnp.where(h[:, :6] > 0, h @ w, -1e9),
    "a table": lambda h, w, b: (h @ w) * np.arange(1.0, 7.0, dtype=np.float32),
    "a held bias": lambda h, w, b: h @ w + np.arange(1.0, 7.0, dtype=np.float32),
}


@pytest.mark.parametrize("name", BESIDE)
def test_the_fronts_agree_about_what_is_beside_a_low_value(name: str) -> None:
    def between(h: jax.Array, w: jax.Array, vector: jax.Array) -> Any:
        made = BESIDE[name](h, w, vector)
        found, *more = made if isinstance(made, tuple) else (made,)
        return jnp.einsum("...ab,ac->...bc", found, jnp.ones((found.shape[-2], 4))), more

    given = jnp.ones((8, 16)), jnp.ones((16, 6)), FAR if name in NO_BIAS else FAR[:6]
    low = "float16" if "float16" in name else "bfloat16"
    with events.capture() as records:
        jax.make_jaxpr(jax_autocast(between, dtype=low))(*given)
    ours = autocast(jax.jit(between).lower(*given), dtype=low).report.operations
    fronts = [
        sorted((each.aten.partition(".")[0], each.after) for each in ours),
        sorted((each.operation.partition(".")[0], each.after.rpartition(" ")[2]) for each in records),
    ]
    compared = {"add", "mul", "div", "sub", "tanh", "minimum", "clamp", "where"}
    found, expected = ([each for each in front if each[0] in compared] for front in fronts)
    assert found == expected
    assert (low in {dtype for _, dtype in found}) == (name in BIASES or name in LOW_BESIDE)


LOW_BESIDE = {"a target", "a far bound", "a far bound, float16", "a mask", "a held bias", "a power of two"}
"""Where something is low beside the products."""


def test_a_bias_follows_a_product_of_which_each_platform_has_one() -> None:
    def network(x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
        return jnp.abs(x @ w + bias) @ w

    exported = jax.export.export(jax.jit(network), platforms=("tpu", "cpu"))(jnp.ones((8, 8)), jnp.eye(8), jnp.ones(8))
    assert runs_in(autocast(exported), "add") == ["bfloat16"]


def test_sums_stay_wide_whatever_the_policy_says() -> None:
    body = f"""%a = stablehlo.dot_general %x, %w, {DOT}
      %zero = stablehlo.constant dense<0.0> : tensor<f32>
      %s = stablehlo.reduce(%a init: %zero) applies stablehlo.add across dimensions = [1] : (tensor<8x8xf32>, tensor<f32>) -> tensor<8xf32>
      %b = stablehlo.broadcast_in_dim %s, dims = [0] : (tensor<8xf32>) -> tensor<8x8xf32>
      %out = stablehlo.dot_general %b, %w, {DOT}"""  # noqa: E501
    with pytest.warns(RuleWarning, match="sum = low .*stays float32"):
        told = autocast(main(body), rules={"sum": "low"})
    for converted in (told, autocast(main(body))):
        assert runs_in(converted, "reduce.add") == ["float32"]
        assert "running sum" in why(converted, "reduce.add")
    converted = autocast(main(body.replace("stablehlo.add across", "stablehlo.maximum across")))
    assert runs_in(converted, "reduce.maximum") == ["bfloat16"]
    assert "stablehlo.maximum across dimensions = [1] : (tensor<8x8xbf16>, tensor<bf16>)" in converted.text()


# Constants.

CONSTANTS = [
    # (constant, low dtype, whether the operation that reads it runs low, words of the reason)
    ("1.0e+04", "bfloat16", True, ""),
    ("3.4028235e+38", "bfloat16", False, "overflows in bfloat16"),
    ("0xFF800000", "bfloat16", True, ""),
    ("7.0e+04", "float16", False, "overflows in float16"),
    ("1.0e-08", "float16", False, "becomes zero in float16"),
    ("1.0e-08", "bfloat16", True, ""),
]


@pytest.mark.parametrize(("value", "dtype", "low", "reason"), CONSTANTS, ids=[f"{r[0]} {r[1]}" for r in CONSTANTS])
def test_constants_are_checked_before_they_are_narrowed(value: str, dtype: str, low: bool, reason: str) -> None:
    converted = autocast(
        main(
            f"""%a = stablehlo.dot_general %x, %w, {DOT}
            %c = stablehlo.constant dense<{value}> : tensor<f32>
            %d = stablehlo.broadcast_in_dim %c, dims = [] : (tensor<f32>) -> tensor<8x8xf32>
            %b = stablehlo.minimum %a, %d : tensor<8x8xf32>
            %out = stablehlo.dot_general %b, %w, {DOT}"""
        ),
        dtype=dtype,
    )
    assert runs_in(converted, "minimum") == [dtype if low else "float32"]
    assert reason in why(converted, "minimum")
    assert converted.report.casts[f"f32->{'bf16' if dtype == 'bfloat16' else 'f16'}"] == (2 if low else 3)


def test_a_contraction_with_a_constant_out_of_range_stays() -> None:
    arguments = "%x: tensor<8x8xf32>"
    weight = "%w = stablehlo.constant dense<1.0e5> : tensor<8x8xf32>"
    converted = autocast(
        main(f"{weight}\n%out = stablehlo.dot_general %x, %w, {DOT}", arguments=arguments), dtype="f16"
    )
    assert runs_in(converted, "dot_general") == ["float32"]
    assert "overflows in float16" in why(converted, "dot_general")


def test_a_constant_that_both_read_is_there_twice() -> None:
    converted = autocast(
        main(
            f"""%c = stablehlo.constant dense<0.1> : tensor<8x8xf32>
            %a = stablehlo.dot_general %x, %c, {DOT}
            %out = stablehlo.add %a, %c : tensor<8x8xf32>"""
        )
    )
    assert converted.report.casts == {"f32->bf16": 1}  # of %x
    assert "dense<1.000980e-01> : tensor<8x8xbf16>" in converted.text()
    assert "dense<1.000000e-01> : tensor<8x8xf32>" in converted.text()


# Loops and functions.


def loop(step: str) -> str:
    """A loop of three iterations that carries %h and yields ``%new``."""
    return main(
        f"""%n = stablehlo.constant dense<0> : tensor<i32>
        %r:2 = stablehlo.while(%h = %x, %i = %n) : tensor<8x8xf32>, tensor<i32>
        cond {{
          %end = stablehlo.constant dense<3> : tensor<i32>
          %go = stablehlo.compare LT, %i, %end : (tensor<i32>, tensor<i32>) -> tensor<i1>
          stablehlo.return %go : tensor<i1>
        }} do {{
          {step}
          %one = stablehlo.constant dense<1> : tensor<i32>
          %j = stablehlo.add %i, %one : tensor<i32>
          stablehlo.return %new, %j : tensor<8x8xf32>, tensor<i32>
        }}
        %out = stablehlo.dot_general %r#0, %w, {DOT}"""
    )


LOOPS = [
    # (body, dtype of the carried value, words of the reason)
    (f"%d = stablehlo.dot_general %h, %w, {DOT}\n%new = stablehlo.tanh %d : tensor<8x8xf32>", "bfloat16", "only low"),
    (f"%d = stablehlo.dot_general %x, %w, {DOT}\n%new = stablehlo.add %h, %d : tensor<8x8xf32>", "float32", "sum"),
    (
        f"%d = stablehlo.dot_general %h, %w, {DOT}\n%new = stablehlo.exponential %d : tensor<8x8xf32>",
        "bfloat16",
        "only low",
    ),
    (
        f"%d = stablehlo.dot_general %h, %w, {DOT}\n%e = stablehlo.sine %h : tensor<8x8xf32>\n"
        "%new = stablehlo.add %d, %e : tensor<8x8xf32>",
        "float32",
        "stays float32",
    ),
]


@pytest.mark.parametrize(
    ("step", "dtype", "reason"), LOOPS, ids=["state", "running sum", "cast in the loop", "read wide"]
)
def test_one_colour_on_the_back_edge(step: str, dtype: str, reason: str) -> None:
    converted = autocast(loop(step))
    assert runs_in(converted, "while#0") == [dtype]
    assert reason in why(converted, "while#0")
    inputs = [np.full((8, 8), 0.1, np.float32), np.full((8, 8), 0.2, np.float32)]
    expected = module_runs.run(ir.parse(loop(step)), inputs)[0]
    np.testing.assert_allclose(module_runs.run(converted.module, inputs)[0], expected, rtol=0.03)


def test_one_colour_for_a_function_and_all_its_callers() -> None:
    def relu(length: int) -> str:
        turns = [f"%n{i + 1} = stablehlo.negate %n{i} : tensor<8x8xf32>" for i in range(length)]
        return f"""func.func private @relu(%n0: tensor<8x8xf32>) -> tensor<8x8xf32> {{
          %zero = stablehlo.constant dense<0.0> : tensor<8x8xf32>
          {" ".join(turns)}
          %b = stablehlo.maximum %n{length}, %zero : tensor<8x8xf32>
          return %b : tensor<8x8xf32>
        }}"""

    body = f"""%a = stablehlo.dot_general %x, %w, {DOT}
      %b = func.call @relu(%a) : (tensor<8x8xf32>) -> tensor<8x8xf32>
      %c = stablehlo.dot_general %b, %w, {DOT}"""
    last = f"%out = stablehlo.dot_general %c, %w, {DOT}"
    alone = autocast(main(f"{body}\n{last}", more=relu(0)))
    assert runs_in(alone, "maximum") == ["bfloat16"]
    assert "@relu(%arg0: tensor<8x8xbf16>) -> tensor<8x8xbf16>" in alone.text()
    other = "%out = func.call @relu(%e) : (tensor<8x8xf32>) -> tensor<8x8xf32>"
    both = f"{body}\n%e = stablehlo.exponential %c : tensor<8x8xf32>\n{other}"
    shared = autocast(main(both, more=relu(SMALL)))
    assert runs_in(shared, "maximum") == ["float32"]
    assert runs_in(shared, "dot_general") == ["bfloat16", "bfloat16"]
    # A small function is cloned for each colour.
    copied = autocast(main(both, more=relu(0)))
    assert runs_in(copied, "maximum") == ["bfloat16", "float32"]
    assert len(ir.functions(copied.module)) == 3
    # Clones of one colour are merged.
    again = f"{body}\n%e = func.call @relu(%c) : (tensor<8x8xf32>) -> tensor<8x8xf32>\n{last.replace('%c', '%e')}"
    merged = autocast(main(again, more=relu(0)))
    assert list(ir.functions(merged.module)) == ["main", "relu"]


def test_branches_give_one_colour() -> None:
    def branches(second: str) -> str:
        return main(
            f"""%a = stablehlo.dot_general %x, %w, {DOT}
            %r = "stablehlo.if"(%p) ({{
              %t = stablehlo.abs %a : tensor<8x8xf32>
              stablehlo.return %t : tensor<8x8xf32>
            }}, {{
              {second}
              stablehlo.return %u : tensor<8x8xf32>
            }}) : (tensor<i1>) -> tensor<8x8xf32>
            %out = stablehlo.dot_general %r, %w, {DOT}""",
            arguments="%x: tensor<8x8xf32>, %w: tensor<8x8xf32>, %p: tensor<i1>",
        )

    low = autocast(branches("%u = stablehlo.negate %a : tensor<8x8xf32>"))
    assert (runs_in(low, "if#0"), runs_in(low, "abs")) == (["bfloat16"], ["bfloat16"])
    mixed = autocast(branches("%u = stablehlo.exponential %a : tensor<8x8xf32>"))
    assert runs_in(mixed, "dot_general") == ["bfloat16", "bfloat16"]
    assert runs_in(mixed, "exponential") == ["float32"]


# Casts and precision in the original program.


def test_casts_of_the_program_are_folded_where_that_keeps_the_rounding() -> None:
    # float16 survives float32, so one rounding is left; bfloat16 back and forth is a rounding that must stay.
    body = """%h = stablehlo.convert %x : (tensor<8x8xf32>) -> tensor<8x8xf16>
      %f = stablehlo.convert %h : (tensor<8x8xf16>) -> tensor<8x8xf32>
      %g = stablehlo.convert %f : (tensor<8x8xf32>) -> tensor<8x8xf16>
      %d = stablehlo.convert %g : (tensor<8x8xf16>) -> tensor<8x8xf64>
      %e = stablehlo.convert %d : (tensor<8x8xf64>) -> tensor<8x8xf32>
      %b = stablehlo.convert %e : (tensor<8x8xf32>) -> tensor<8x8xbf16>
      %out = stablehlo.convert %b : (tensor<8x8xbf16>) -> tensor<8x8xf32>"""
    given = main(body, arguments="%x: tensor<8x8xf32>")
    converted = autocast(given)
    assert converted.report.folded >= 1
    assert converted.text().count("stablehlo.convert") < given.count("stablehlo.convert")
    x = np.linspace(1, 2, 64, dtype=np.float32).reshape(8, 8)
    np.testing.assert_array_equal(
        module_runs.interpret(converted.module, [x])[0], module_runs.interpret(ir.parse(given), [x])[0]
    )


@pytest.mark.parametrize("exported", [False, True])  # a portable artifact has a composite in its place
@pytest.mark.parametrize("precision", [None, "highest"])
def test_a_ragged_product_runs_low_unless_it_asks_for_a_precision(precision: str | None, exported: bool) -> None:
    def product(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(x, w, sizes, precision=precision)

    types = [jax.ShapeDtypeStruct(s, d) for s, d in (((8, 16), "float32"), ((2, 16, 4), "float32"), ((2,), "int32"))]
    if exported:
        converted = autocast(jax.export.export(jax.jit(product), platforms=("tpu",))(*types))
    else:
        converted = autocast(jax.jit(product).trace(*types).lower(lowering_platforms=("tpu",)).as_text())
    (line,) = (each for each in converted.text().splitlines() if 'ragged_dot"' in each)
    assert ("tensor<8x16xbf16>" in line) == (precision is None)
    assert ("precision HIGHEST" in line) == (precision == "highest")
    again = ir.parse(converted.artifact())
    assert ("tensor<8x16xbf16>" in str(again)) == (precision is None)


# Shardings name the axes of the values that they are attributes of, also after a conversion.

SHARDINGS = {
    "sdy": ('{"x"}, {"y"}', '{"y"}, {"x"}', "sdy.sharding = #sdy.sharding_per_value<[<@mesh, [%s]>]>"),
    "mhlo": ("devices=[2,2]0,2,1,3", "devices=[2,2]0,1,2,3", 'mhlo.sharding = "{%s}"'),
    "mhlo iota": ("devices=[2,2]<=[2,2]T(1,0)", "devices=[2,2]<=[4]", 'mhlo.sharding = "{%s}"'),
}
"""Dialect -> sharding of a product with its axes split, that of its transpose, the attribute."""


def split_product(before: str, after: str) -> str:
    """The gradient of a weight as JAX differentiates it: a transpose of a product, each with attributes."""
    return f"""module @m attributes {{mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32}} {{
      sdy.mesh @mesh = <["x"=2, "y"=2]>
      func.func public @main(%dy: tensor<8x4xf32>, %x: tensor<8x6xf32>) -> tensor<6x4xf32> {{
        %0 = stablehlo.dot_general %dy, %x, contracting_dims = [0] x [0] {{{before}}}
          : (tensor<8x4xf32>, tensor<8x6xf32>) -> tensor<4x6xf32>
        %1 = stablehlo.transpose %0, dims = [1, 0] {{{after}}} : (tensor<4x6xf32>) -> tensor<6x4xf32>
        return %1 : tensor<6x4xf32>
      }}
    }}"""


@pytest.mark.parametrize("dialect", SHARDINGS)
def test_a_product_alone_with_a_sharding_is_not_swapped(dialect: str) -> None:
    split, _, attribute = SHARDINGS[dialect]
    parsed = ir.parse(split_product(attribute % split, ""))
    before = ir.text(parsed)
    (product,) = (each for each in ir.operations(parsed.operation) if each.name == "stablehlo.dot_general")
    with product.location:
        assert not untranspose(product)
    assert ir.text(parsed) == before


@pytest.mark.parametrize("dialect", SHARDINGS)
def test_the_pass_keeps_them(dialect: str) -> None:
    split, exchanged, attribute = SHARDINGS[dialect]
    text = autocast(split_product(attribute % split, attribute % exchanged)).text()
    assert "bf16" in text
    for line in text.splitlines():
        if "dot_general" in line or "transpose" in line:
            assert (attribute % exchanged in line) == ("-> tensor<6x4x" in line)


def test_sharding_annotations_are_passed_through() -> None:
    converted = autocast(
        main(
            f"""%a = stablehlo.dot_general %x, %w, {DOT}
            %b = stablehlo.custom_call @Sharding(%a) {{mhlo.sharding = "{{replicated}}"}} : (tensor<8x8xf32>) -> tensor<8x8xf32>
            %c = sdy.sharding_constraint %b <@mesh, [{{}}, {{}}]> : tensor<8x8xf32>
            %out = stablehlo.dot_general %c, %w, {DOT}""",  # noqa: E501
            more='sdy.mesh @mesh = <["i"=1]>',
        )
    )
    assert runs_in(converted, "custom_call.Sharding") == ["bfloat16"]
    assert runs_in(converted, "sdy.sharding_constraint") == ["bfloat16"]
    assert converted.report.casts == {"f32->bf16": 2}


def test_inside_of_a_manual_computation() -> None:
    converted = autocast(
        main(
            f"""%r = sdy.manual_computation(%x, %w) in_shardings=[<@mesh, [{{"i"}}, {{}}]>, <@mesh, [{{}}, {{}}]>]
              out_shardings=[<@mesh, [{{"i"}}, {{}}]>] manual_axes={{"i"}} (%a: tensor<4x8xf32>, %b: tensor<8x8xf32>) {{
              %c = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0] : (tensor<4x8xf32>, tensor<8x8xf32>) -> tensor<4x8xf32>
              %d = stablehlo.abs %c : tensor<4x8xf32>
              sdy.return %d : tensor<4x8xf32>
            }} : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
            %out = stablehlo.dot_general %r, %w, {DOT}""",  # noqa: E501
            more='sdy.mesh @mesh = <["i"=2]>',
        )
    )
    assert runs_in(converted, "abs") == ["bfloat16"]
    assert converted.report.casts == {"f32->bf16": 2}


# The signature.


def test_a_result_that_is_low_anyway_is_given_low_on_request() -> None:
    text = f"""func.func @main(%x: tensor<8x8xf32>, %w: tensor<8x8xf32>) -> (tensor<8x8xf32>, tensor<8x8xf32>) {{
      %a = stablehlo.dot_general %x, %w, {DOT}
      %b = stablehlo.abs %a : tensor<8x8xf32>
      %c = stablehlo.dot_general %b, %w, {DOT}
      return %b, %c : tensor<8x8xf32>, tensor<8x8xf32>
    }}"""
    kept, narrowed = autocast(text), autocast(text, keep_io=False)
    assert [kind.element for kind in ir.signature(kept.module).outputs if kind] == ["f32", "f32"]
    assert kept.report.casts == {"f32->bf16": 2, "bf16->f32": 1}
    assert [kind.element for kind in ir.signature(narrowed.module).outputs if kind] == ["bf16", "f32"]
    assert [kind.element for kind in ir.signature(narrowed.module).inputs if kind] == ["bf16", "bf16"]
    assert narrowed.report.casts == {}
    assert runs_in(narrowed, "result#0") == ["bfloat16"]


def test_a_narrowed_argument_shares_no_memory_with_a_wide_result() -> None:
    def arguments(sharing: int) -> str:
        alias = "{tf.aliasing_output = 0 : i32}"
        return ", ".join(f"%{name}: tensor<8x8xf32> {alias if i == sharing else ''}" for i, name in enumerate("xw"))

    body = f"%a = stablehlo.dot_general %x, %w, {DOT}\n%out = stablehlo.add %a, %x : tensor<8x8xf32>"
    for sharing, left in ((0, 1), (1, 0)):  # %x stays float32, %w does not
        converted = autocast(main(body, arguments=arguments(sharing)), keep_io=False)
        assert converted.text().count("tf.aliasing_output") == left
        inputs = [
            np.ones((8, 8), ir.numpy_dtype(kind.element)) for kind in ir.signature(converted.module).inputs if kind
        ]
        np.testing.assert_array_equal(module_runs.run(converted.module, inputs)[0], np.full((8, 8), 9.0))


def test_arguments_that_cannot_be_followed() -> None:
    text = main(f"%out = stablehlo.dot_general %x, %w, {DOT}")
    for dtype in ("float8_e4m3fn", object()):
        with pytest.raises(UnsupportedDtypeError, match="offers bfloat16, float16"):
            autocast(text, dtype=dtype)
    with pytest.raises(PolicyError, match="unknown policy 'tpx'"):
        autocast(text, policy="tpx")
    with pytest.raises(ModuleError, match=r"expects MLIR text or bytes.*got int"):
        autocast(3)
    with pytest.raises(ModuleError, match="nothing to convert"):
        autocast("module {\n}")


def test_report() -> None:
    from xla_amp.common import events

    with events.capture() as records:
        converted = autocast(main(f"%out = stablehlo.dot_general %x, %w, {DOT}"))
    assert [each.operation for each in records] == [each.operation for each in converted.report.operations]
    assert {each.front for each in records} == {"stablehlo"}
    dot = next(each for each in records if each.operation == "dot_general")
    assert (dot.cast, dot.given, dot.used, dot.policy) == ("low", ("float32",), ("bfloat16",), "tpu")
    assert "tpu.toml" in dot.origin
    assert converted.report.casts == {"f32->bf16": 2}
    assert "casts inserted  2 x f32->bf16" in str(converted.report)
    assert "dot_general" in str(converted.report)


def test_the_table_names_operations_that_exist() -> None:
    known = {"func.call"}
    for name in ("chlo", "sdy", "stablehlo"):
        generated = pytest.importorskip(f"jaxlib.mlir.dialects._{name}_ops_gen")
        known |= {value.OPERATION_NAME for value in vars(generated).values() if hasattr(value, "OPERATION_NAME")}
    missing = []
    for name in table().rows:
        bases = (name.partition(".")[0], name.rpartition(".")[0])
        base = next((base for base in bases if base in table().narrowed), name)
        if not {base, f"stablehlo.{base}"} & known:
            missing.append(name)
    assert missing == []
    # The policy has no rules for operations that are not in the table.
    unknown = [
        name
        for name in catalogue().names["stablehlo"]
        if name not in table().rows and name.partition(".")[0] not in table().rows
    ]
    assert unknown == []
