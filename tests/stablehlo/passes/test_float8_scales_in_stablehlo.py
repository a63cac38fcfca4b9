"""The casts with a scale for each row or block in StableHLO programs: values, tools, and what XLA makes of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xla_amp
from xla_amp import stablehlo
from xla_amp.cli import main
from xla_amp.errors import PolicyError, RuleWarning
from xla_amp.stablehlo import ir
from xla_amp.stablehlo.tools import comparison, targets

CASTS = ("fp8_rowwise", "mxfp8")


def normal(key: int, *shape: int) -> jax.Array:
    return 0.2 * jax.random.normal(jax.random.key(key), shape)


MATRICES = [normal(key, 32, 32) for key in range(2)]
X = normal(9, 32, 32)


def loss(weights, x):
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return jnp.mean(x**2)


@pytest.fixture(scope="module")
def step():
    return jax.export.export(jax.jit(jax.grad(loss)))(MATRICES, X)


@pytest.fixture(scope="module", params=CASTS)
def converted(request, step):
    """The cast, and the gradient of a network of two layers under it."""
    return request.param, stablehlo.autocast(step, rules={"matmul": request.param})


@pytest.mark.parametrize("cast", CASTS)
def test_products_are_those_of_jax_at_all_scales(cast: str) -> None:
    """Equal to those of `xla_amp.jax.autocast`, and not to those with one scale for an operand."""

    def both(w, x, g):
        y, back = jax.vjp(lambda x: 2 * x @ w, x)
        return y, back(g)[0]

    shapes = ((64, 32), (2, 8, 64), (2, 8, 32))
    program = jax.jit(both).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    run, plain = (comparison.Runs(stablehlo.autocast(program, rules={"matmul": each}).module) for each in (cast, "fp8"))
    again = jax.jit(xla_amp.jax.autocast(both, rules={"matmul": cast}))
    rng = np.random.default_rng(0)
    for _ in range(4):
        # Integers of 7 bits, of which e4m3 keeps 4: their sums are exact in any order.
        scales = 2.0 ** rng.integers(-20, 20, (2, 2, 8, 1))
        given = [
            (rng.integers(-99, 99, shape) * scale).astype(np.float32)
            for shape, scale in zip(shapes, (1, *scales), strict=True)
        ]
        found = [np.asarray(each, jnp.bfloat16) for each in run(given)]
        for each, wanted in zip(found, again(*given), strict=True):
            np.testing.assert_array_equal(each, np.asarray(wanted).astype(jnp.bfloat16))
    assert any((np.asarray(a, jnp.bfloat16) != b).any() for a, b in zip(plain(given), found, strict=True))


def test_inspect_and_compare_read_it(step, converted) -> None:
    cast, after = converted
    gradient = "f8E4M3FN" if cast == "mxfp8" else "f8E5M2"
    wanted = {("f8E4M3FN", "f8E4M3FN", "bf16"): 2, ("bf16", "bf16", "f32"): 2}
    one = (gradient, "f8E4M3FN", "bf16")
    wanted[one] = wanted.get(one, 0) + 1
    inspected = stablehlo.inspect(after)
    assert inspected.contractions == wanted
    assert [each.flops for each in inspected.rows if each.product] == [2 * 32**3] * 5
    compared = stablehlo.compare(step, after)
    found = [each.b.relative for each in compared.operations if each.operation == "dot_general"]
    assert len(found) >= 3  # forward and data
    assert all(0.001 < each < 0.2 for each in found)
    assert all(each.b.relative < 0.2 for each in compared.outputs)


def test_an_overflow_is_found_in_it() -> None:
    small = [X.astype(jnp.bfloat16), MATRICES[0].astype(jnp.bfloat16)]
    after = stablehlo.autocast(jax.jit(jnp.dot).lower(*small), rules={"matmul": "mxfp8"})
    flat = [np.asarray(each) for each in small]
    found = stablehlo.find_overflow(after, [np.full_like(flat[0], 3e38), 100 * flat[1]])
    assert [each.place.operation for each in found.producers] == ["dot_general"]


def test_it_survives_every_format_and_another_conversion(converted) -> None:
    cast, after = converted
    wanted = stablehlo.inspect(after)
    for written in (after.text(), after.bytecode(), after.artifact()):
        found = stablehlo.inspect(written)
        assert found.contractions == wanted.contractions
        assert found.operations["dot_general"] == wanted.operations["dot_general"]
    with pytest.warns(RuleWarning, match="no effect"):
        again = stablehlo.autocast(after, rules={"matmul": cast})
    assert stablehlo.inspect(again).contractions == wanted.contractions


def test_gpus_make_8_bit_products_of_it(step) -> None:
    rows, blocks = "__cublas$lt$matmul$f8", "__cudnn$blockScaledDot"
    with targets.Compilers() as compilers:
        for target, cast, call in (
            ("h100", "fp8_rowwise", rows),
            ("b200", "fp8_rowwise", rows),
            ("b200", "mxfp8", blocks),
        ):
            if not targets.available(target):
                pytest.skip(f"the compiler for {target} is not installed")
            after = stablehlo.autocast(step, rules={"matmul": cast}, target=target)
            found = stablehlo.inspect(after, targets=[target], compilers=compilers).targets[target]
            assert not isinstance(found, str), found
            assert found.hlo.count(f'custom_call_target="{call}"') == 3  # two forward, one for the data


def test_a_target_without_such_products(step) -> None:
    for target, name in (("h100", "NVIDIA H100"), ("v6e", "TPU v6e"), ("a100", "NVIDIA A100")):
        with pytest.raises(
            PolicyError, match=rf"'mxfp8' is not supported on {name}.*, which scales no blocks; .*'fp8'"
        ):
            stablehlo.autocast(step, rules={"matmul": "mxfp8"}, target=target)
    with pytest.warns(RuleWarning, match=r"NVIDIA A100.* has no such products, which need a GPU of .* 8\.9"):
        report = stablehlo.autocast(step, rules={"matmul": "fp8_rowwise"}, target="a100").report
    assert {each.cast for each in report.operations if each.product} == {"low"}


def test_estimates_are_for_the_target() -> None:
    shapes = [jax.ShapeDtypeStruct((4096, 4096), jnp.float32)] * 2
    program = jax.jit(jnp.dot).lower(*shapes)

    def told(**given) -> str:
        report = stablehlo.autocast(program, **given).report
        return next(each.why for each in report.operations if each.product)

    assert "us on b200" in told(policy="mxfp8")
    assert "us on h100" in told(policy="fp8")
    assert "us on h200" in told(policy="fp8", target="h200")


def test_the_command_line(step, tmp_path, capsys) -> None:
    before, after = tmp_path / "step.mlirbc", tmp_path / "low.mlirbc"
    stablehlo.save(stablehlo.Program(module=ir.parse(step.mlir_module_serialized), format="bytecode"), before)
    command = ["convert", str(before), "-o", str(after), "--policy", "mxfp8", "--rule", "matmul=mxfp8", "--target"]
    assert main([*command, "h100"]) == 2
    assert "scales no blocks" in capsys.readouterr().err
    assert not after.exists()
    assert main([*command, "b200"]) == 0
    assert "f8E4M3FN -> bf16" in capsys.readouterr().out
    assert main(["compare", str(before), str(after), "--tolerance", "0.2"]) == 0
