"""``xla-amp convert --inputs`` tells the achieved error; ``--target-error`` is met by the whole program, or fails."""

from __future__ import annotations

import functools
import json

import jax
import module_runs
import numpy as np
import pytest

from xla_amp.cli import target_error
from xla_amp.common import units
from xla_amp.errors import RuleWarning
from xla_amp.stablehlo import io
from xla_amp.stablehlo.passes.autocast import settings
from xla_amp.tools.inspect import conversion

RNG = np.random.default_rng(0)
X, W = (scale * RNG.standard_normal((16, 16)).astype(np.float32) for scale in (np.float32(1), np.float32(0.25)))
LAYERS = [0.25 * RNG.standard_normal((16, 16)).astype(np.float32) for _ in range(6)]


def subtraction(x, w):
    return ((x @ w) - (x @ (w * 1.01))) @ w


def chain(x, *layers):
    for layer in layers:
        x = x @ layer
    return x


@pytest.fixture
def run(call_cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub.mlir").write_text(jax.jit(subtraction).lower(X, W).as_text())
    np.savez(tmp_path / "s.npz", X, W)
    np.savez(tmp_path / "t.npz", X[::-1], W)

    return functools.partial(call_cli, "convert", "sub.mlir", "-o", "low.mlir")


def error_of(path, *arrays) -> float:
    """Computed here, with NumPy as the reference."""
    (found,) = module_runs.run(io.load(path).module, list(arrays))
    exact = subtraction(arrays[0].astype(np.float64), arrays[1].astype(np.float64))
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


def test_the_achieved_error_is_told_and_a_large_one_warned_of(run, tmp_path):
    status, out, err = run("--inputs", "s.npz")
    achieved = error_of(tmp_path / "low.mlir", X, W)
    assert status == 0
    assert achieved > 0.1
    assert f"How wrong are the results?\n  achieved error {units.error(achieved)}; one rounding of the samples" in out
    assert f"xla-amp: warning: the results on the samples are wrong by {achieved:.2g}" in err
    told = json.loads(run("--inputs", "s.npz", "--json")[1])["achieved_error"]
    assert told["samples"][0][0] == pytest.approx(achieved, rel=0.01)
    assert 0 < told["rounding"] < 1e-4


@pytest.mark.parametrize("samples", [("s.npz",), ("s.npz", "t.npz")], ids=["one sample", "two"])
def test_a_target_error_is_met_with_a_product_left_low(run, tmp_path, samples):
    given = [word for name in samples for word in ("--inputs", name)]
    status, out, err = run(*given, "--target-error", "1e-2", "--json")
    assert (status, err) == (0, "")
    assert error_of(tmp_path / "low.mlir", X, W) < 1e-2
    rows = [row for row in json.loads(out)["operations"] if row["operation"] == "dot_general"]
    assert sorted(row["after"] for row in rows) == ["bfloat16", "float32", "float32"]
    assert all(row["why"].startswith("target error: with nothing else in bfloat16") for row in rows if row["after"] == "float32")  # fmt: skip # noqa: E501
    if len(samples) == 2:
        assert error_of(tmp_path / "low.mlir", X[::-1], W) < 1e-2


def test_a_target_that_cannot_be_met_writes_nothing_and_has_its_own_status(run, tmp_path):
    np.savez(tmp_path / "nan.npz", np.nan * X, W)
    status, out, err = run("--inputs", "nan.npz", "--target-error", "1e-2")
    assert (status, out) == (3, "")
    assert err.startswith("xla-amp: --target-error 0.01: the achieved error is inf")
    assert not (tmp_path / "low.mlir").exists()


def test_a_target_that_only_float32_meets_converts_nothing(run):
    status, out, err = run("--inputs", "s.npz", "--target-error", "1e-6")
    assert (status, err) == (0, "")
    assert "casts inserted  none: nothing was converted\n" in out
    assert " low " not in out.partition("\nDecisions\n")[2]  # no rule's cast beside a product that it did not reach


def test_a_program_that_xla_cannot_run_is_converted_all_the_same(run, tmp_path):
    kind = "tensor<16x16xf32>"
    (tmp_path / "sub.mlir").write_text(f"""func.func @main(%x: {kind}, %w: {kind}) -> {kind} {{
      %y = stablehlo.custom_call @mine(%x, %w) : ({kind}, {kind}) -> {kind}
      return %y : {kind} }}""")
    status, _, err = run("--inputs", "s.npz")
    assert status == 0
    assert err.startswith("xla-amp: warning: the achieved error was not measured: ")
    assert (tmp_path / "low.mlir").exists()


def test_a_target_error_needs_inputs(run):
    assert run("--target-error", "0.1") == (2, "", "xla-amp: --target-error needs --inputs\n")


def test_smaller_targets_keep_more_of_a_chain_without_a_cliff():
    program = io.read(jax.jit(chain).lower(X, *LAYERS).as_text().encode())
    policy, low = settings(None, None, {"dot_general": "low"})
    kept = []
    for share in (1.1, 0.8, 0.5):
        if not kept:
            whole = target_error.convert_within(program, policy, low, [(X, *LAYERS)], 1.0).achieved.error
        found = target_error.convert_within(program, policy, low, [(X, *LAYERS)], share * whole)
        assert found.found.met
        kept.append(
            sum(each.after == "float32" and each.flops is not None for each in found.converted.report.operations)
        )
    assert kept[0] == 0 < kept[1] < kept[2] < len(LAYERS)


def test_a_rule_without_effect_is_told():
    program = io.read(jax.jit(chain).lower(X, *LAYERS[:1]).as_text().encode())
    with pytest.warns(RuleWarning, match="tanh"):
        target_error.convert_within(program, *settings(None, None, {"tanh": "fp32"}), [(X, LAYERS[0])], 0.1)


def test_a_result_that_is_zero_but_for_rounding_is_not_judged():
    def step(x, w, b):  # the mean of `y` is zero, so the gradient of a bias before the norm is, too
        def loss(b):
            y = x @ w + b
            return jax.numpy.mean((y - y.mean(0)) ** 2)

        return jax.value_and_grad(loss)(b)

    program = io.read(jax.jit(step).lower(X, W, W[0]).as_text().encode())
    found = target_error.convert_within(program, *settings(None, None, {"dot_general": "low"}), [(X, W, W[0])], 1e-2)
    assert found.found.met
    assert found.achieved.not_judged == ("result[1]",)
    assert 0 < found.achieved.error < 1e-2
    assert found.achieved.rounding < 1e-5
    assert len(found.found.plan) == 1


def test_the_last_quarter_of_the_samples_only_checks():
    program = io.read(jax.jit(chain).lower(X, *LAYERS).as_text().encode())
    samples = [(RNG.standard_normal((16, 16)).astype(np.float32), *LAYERS) for _ in range(4)]
    found = target_error.convert_within(program, *settings(None, None, {"dot_general": "low"}), samples, 1.0)
    assert found.found.held_out["results"] == found.achieved.samples[-1][0]


def test_a_program_with_a_symbolic_batch_has_products():
    (batch,) = jax.export.symbolic_shape("b")
    exported = jax.export.export(jax.jit(lambda x: jax.numpy.tanh(x @ W) @ W))
    program = io.read(bytes(exported(jax.ShapeDtypeStruct((batch, 16), np.float32)).serialize()))
    samples = [(RNG.standard_normal((rows, 16)).astype(np.float32),) for rows in (4, 8, 4, 6)]
    found = target_error.convert_within(program, *settings(None, None, None), samples, 1e-6)
    assert not found.found.plan
    assert found.found.met == (found.achieved.rounding < 1e-6)
    (could, *_) = conversion.page(found.converted.report).sections
    assert could.text == "2 of 2 products and convolutions"
    whys = [each.why for each in found.converted.report.operations if each.product]
    assert [why.partition(" the results")[0] for why in whys] == ["target error: with nothing else in bfloat16"] * 2
