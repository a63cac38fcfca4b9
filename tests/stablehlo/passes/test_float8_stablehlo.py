"""The cast `fp8` in StableHLO programs: which products, their values, and what XLA makes of them for GPUs."""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xla_amp
from xla_amp import stablehlo
from xla_amp.cli import main
from xla_amp.errors import PolicyError, RuleWarning
from xla_amp.stablehlo import ir
from xla_amp.stablehlo.tools import targets

RULES = {"matmul": "fp8"}
E4, LOW = "float8_e4m3fn", "bfloat16"
FORWARD, DATA, WEIGHT = E4, f"float8_e5m2, {E4}", LOW
WIDTH, HEADS, TOKENS, VOCABULARY, LAYERS = 32, 2, 16, 48, 1


def normal(key: int, *shape: int, dtype=jnp.float32) -> jax.Array:
    return (0.2 * jax.random.normal(jax.random.key(key), shape)).astype(dtype)


def norm(x):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def block(w, x):
    q, k, v = (each.reshape(*x.shape[:2], HEADS, -1) for each in jnp.split(norm(x) @ w["qkv"], 3, -1))
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(q.shape[-1]))
    x = x + jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(x.shape) @ w["out"]
    return x + jax.nn.gelu(norm(x) @ w["up"]) @ w["down"]


def gpt(weights, tokens):
    x = weights["wte"][tokens]
    for layer in weights["layers"]:
        x = block(layer, x)
    with jax.named_scope("lm_head"):
        logits = norm(x) @ weights["wte"].T
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], -1))


def layer(key: int) -> dict[str, jax.Array]:
    shapes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    return {name: normal(10 * key + index, *shape) for index, (name, shape) in enumerate(shapes.items())}


WEIGHTS = {"wte": normal(0, VOCABULARY, WIDTH), "layers": [layer(1 + each) for each in range(LAYERS)]}
IDS = jax.random.randint(jax.random.key(5), (2, TOKENS), 0, VOCABULARY)
GPT_RULES = {"matmul": "fp8", "module:*lm_head.matmul": "low"}


@pytest.fixture(scope="module")
def step():
    """A training step of GPT-2's form without its optimizer, exported; and its conversion."""
    exported = jax.export.export(jax.jit(jax.grad(gpt)))(WEIGHTS, IDS)
    with xla_amp.explain() as report:
        converted = stablehlo.autocast(exported, policy="fp8", rules=GPT_RULES)
    return exported, converted, report


def mlp(weights, x):
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return jnp.mean(x**2)


MATRICES = [normal(key, 32, 32) for key in range(3)]
X = normal(9, 16, 32)


def products(program, **given):
    """What the products of a program read, with their number."""
    report = stablehlo.autocast(program, rules=RULES, **given).report
    return collections.Counter(each.after for each in report.operations if each.operation == "dot_general")


def gradient(function=mlp, *args):
    return jax.jit(jax.grad(function)).lower(*(args or (MATRICES, X)))


def test_forward_and_data_are_in_8_bits_and_weights_are_not(step) -> None:
    _, converted, report = step
    found = [each for each in converted.report.operations if each.operation == "dot_general"]
    # A layer has 4 weights, and 2 products of attention with 2 gradients each; the head, its product and 2 gradients.
    assert collections.Counter(each.after for each in found) == {
        FORWARD: 4 * LAYERS,
        DATA: 4 * LAYERS,
        LOW: 4 * LAYERS + 6 * LAYERS + 3,
    }
    assert all("us on h100" in each.why for each in found if each.cast == "fp8")
    assert all(each.why for each in found)
    used = collections.Counter(each.used for each in report.records if each.cast == "fp8")
    assert used == {(E4,): 4 * LAYERS, ("float8_e5m2", E4): 4 * LAYERS}


@pytest.mark.parametrize("target", ["h100", pytest.param("h200", marks=pytest.mark.exhaustive)])
def test_gpus_make_8_bit_products_of_them(step, target: str) -> None:
    if not targets.available(target):
        pytest.skip(f"the compiler for {target} is not installed")
    inspected = stablehlo.inspect(step[1], targets=[target])
    assert inspected.contractions["f8E4M3FN", "f8E4M3FN", "bf16"] == 4 * LAYERS
    assert inspected.contractions["f8E5M2", "f8E4M3FN", "bf16"] == 4 * LAYERS
    found = inspected.targets[target]
    assert not isinstance(found, str), found
    assert found.hlo.count('custom_call_target="__cublas$lt$matmul$f8"') == 8 * LAYERS


def test_its_gradients_are_those_of_float32_but_for_the_rounding(step) -> None:
    exported, converted, _ = step
    inputs = [np.asarray(each) for each in jax.tree.leaves((WEIGHTS, IDS))]

    def worst(other) -> float:
        return max(each.b.relative for each in stablehlo.compare(exported, other, inputs, operations=False).outputs)

    low = worst(stablehlo.autocast(exported, policy="fp8", rules={"matmul": "low"}))
    assert low < 0.03
    assert 1.5 * low < worst(converted) < 0.2


def test_compare_pairs_the_products(step) -> None:
    compared = stablehlo.compare(gradient(), stablehlo.autocast(gradient(), policy="fp8", rules=RULES))
    assert all(each.b.relative < 0.2 for each in compared.outputs)
    found = [each for each in compared.operations if each.operation == "dot_general"]
    assert len(found) >= 5  # forward and data
    assert all(0.001 < each.b.relative < 0.2 for each in found)


def test_products_have_the_values_of_8_bit_operands_at_all_scales() -> None:
    """Against float64 within the format's bound, and equal to those of `xla_amp.jax.autocast`."""
    function = jax.jit(lambda x, w: x @ w)
    converted = stablehlo.autocast(function.lower(X, MATRICES[0]), policy="fp8", rules=RULES)
    run = ir.compile_module(converted.module)
    again = jax.jit(xla_amp.jax.autocast(function, policy="fp8", rules=RULES))
    rng = np.random.default_rng(0)
    for scale in 10.0 ** rng.uniform(-6, 6, (8, 2)):
        x, w = (np.asarray(each * size, np.float32) for each, size in zip((X, MATRICES[0]), scale, strict=True))
        found = np.asarray(ir.execute(run, [x, w])[0], np.float64)
        # XLA:CPU leaves out the rounding of this result to bfloat16.
        np.testing.assert_array_equal(found.astype(jnp.bfloat16), np.asarray(again(x, w)).astype(jnp.bfloat16))
        a, b = np.abs(x.astype(np.float64)), np.abs(w.astype(np.float64))
        # Each operand: bfloat16, then e4m3 with half a step of its smallest number; the result: bfloat16.
        ea, eb = (np.maximum((2.0**-4 + 2.0**-8) * each, 2.0**-10 * each.max() / 224) for each in (a, b))
        allowed = (ea @ b + a @ eb + ea @ eb) + 2.0**-8 * (a @ b)
        error = np.abs(found - x.astype(np.float64) @ w.astype(np.float64))
        assert (error <= allowed).all()
        assert error.max() > 0.01 * allowed.max()


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    converted = stablehlo.autocast(jax.jit(lambda x, w: x @ w).lower(X, MATRICES[0]), policy="fp8", rules=RULES)
    run = ir.compile_module(converted.module)
    found = np.asarray(ir.execute(run, [np.asarray(X.at[3, 5].set(bad)), np.asarray(MATRICES[0])])[0])
    assert not np.isfinite(found[3]).any()
    assert np.isfinite(np.delete(found, 3, 0)).all()


def test_names_tell_gradients_through_functions_loops_and_checkpoints() -> None:
    whole = {FORWARD: 3, DATA: 2, WEIGHT: 3}
    assert products(gradient()) == whole
    assert products(gradient(jax.jit(mlp))) == whole
    assert products(gradient(jax.checkpoint(mlp))) == whole
    scanned = gradient(lambda w, x: jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0] ** 2),
                       jnp.stack(MATRICES), X)  # fmt: skip
    assert products(scanned) == {FORWARD: 1, DATA: 1, WEIGHT: 1}


def test_without_names_only_a_weight_that_is_read_once_is_told() -> None:
    text = gradient().as_text()
    report = stablehlo.autocast(text, rules=RULES).report
    kept = [each.why for each in report.operations if each.operation == "dot_general" and each.cast == "low"]
    assert products(text) == {FORWARD: 1, LOW: 7}
    assert sum("no location tells which of them is a gradient" in why for why in kept) == 5
    assert products(jax.jit(mlp).lower(MATRICES, X).as_text()) == {FORWARD: 3}


def test_the_pullback_of_a_product_that_is_not_computed() -> None:
    def pullback(w, x, y):
        return jax.vjp(lambda w: jnp.tanh(x @ w[0]) @ w[1], w)[1](y)

    program = jax.jit(pullback).lower(MATRICES[:2], X, X)  # its second product is dead code
    assert products(program) == {FORWARD: 1, DATA: 1, WEIGHT: 2}
    one = jax.jit(lambda w, x, y: jax.vjp(lambda x, w: x @ w, x, w)[1](y)).lower(MATRICES[0], X, X)
    with pytest.warns(RuleWarning, match="the gradient of a weight, or of an argument of the program"):
        assert products(one) == {LOW: 2}


def test_programs_that_are_low_already() -> None:
    small = [each.astype(jnp.bfloat16) for each in MATRICES]
    program = gradient(mlp, small, normal(9, 2, 8, 32, dtype=jnp.bfloat16))
    converted = stablehlo.autocast(program, rules=RULES)
    assert products(program) == {FORWARD: 3, DATA: 2, WEIGHT: 3}
    with pytest.warns(RuleWarning, match="rounds its operands to 8-bit floats itself"):
        assert products(converted) == {LOW: 8}


def test_what_stays_in_16_bits_and_why() -> None:
    def why(function, *args, **given):
        report = stablehlo.autocast(jax.jit(function).lower(*args), **given).report
        return next(each.why for each in report.operations if each.operation in ("dot_general", "convolution"))

    def product(x, w):
        return x @ w

    assert "it would take" in why(product, X, MATRICES[0], policy="fp8")
    with pytest.warns(RuleWarning, match="sums over 30, no multiple of 16"):
        assert "sums over 30" in why(product, normal(0, 16, 30), normal(1, 30, 16), rules=RULES)
    with pytest.raises(PolicyError, match="sums over 30, no multiple of 16"):
        why(product, normal(0, 16, 30), normal(1, 30, 16), rules=RULES, strict=True)
    with pytest.warns(RuleWarning, match="neither operand is a matrix"):
        why(lambda x, w: jnp.sin(x) @ jnp.sin(w), X, MATRICES[0], rules=RULES)
    rows = jax.export.export(jax.jit(product))(
        jax.ShapeDtypeStruct((jax.export.symbolic_shape("n")[0], 32), jnp.float32), MATRICES[0]
    )
    with pytest.warns(RuleWarning, match="a size is not known"):
        stablehlo.autocast(rows, rules=RULES)
    with pytest.raises(PolicyError, match="not supported where the low dtype is float16; pass dtype='bfloat16'"):
        stablehlo.autocast(jax.jit(product).lower(X, MATRICES[0]), rules=RULES, dtype="float16")


def test_the_command_line(tmp_path, capsys) -> None:
    before, after = tmp_path / "step.mlirbc", tmp_path / "low.mlir"
    stablehlo.save(stablehlo.Program(module=ir.copy(gradient().compiler_ir()), format="bytecode"), before)
    assert main(["convert", str(before), "-o", str(after), "--policy", "fp8", "--rule", "matmul=fp8"]) == 0
    assert "f8E5M2 x f8E4M3FN -> bf16" in capsys.readouterr().out
    assert main(["compare", str(before), str(after), "--tolerance", "0.2"]) == 0
    assert 'xla_amp.option.xla_gpu_enable_triton_gemm = "False"' in after.read_text()  # inspect --target compiles so
