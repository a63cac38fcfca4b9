"""``xla-amp convert --inputs`` tells the achieved error; ``--target-error`` is met by the whole program, or fails."""

from __future__ import annotations

import functools
import json
import math

import jax
import jax.numpy as jnp
import module_runs
import numpy as np
import pytest
from jax import lax

from xla_amp.common import units
from xla_amp.errors import ModuleError, RuleWarning, SearchError, TargetError
from xla_amp.stablehlo import autocast, io
from xla_amp.stablehlo.program import parse

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
    assert all(row["why"].startswith("sample inputs: with nothing else in bfloat16") for row in rows if row["after"] == "float32")  # fmt: skip # noqa: E501
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


def test_a_program_that_xla_cannot_run_is_refused_with_its_call(run, tmp_path):
    kind = "tensor<16x16xf32>"
    (tmp_path / "sub.mlir").write_text(f"""func.func @main(%x: {kind}, %w: {kind}) -> {kind} {{
      %y = stablehlo.custom_call @mine(%x, %w) : ({kind}, {kind}) -> {kind}
      return %y : {kind} }}""")
    status, _, err = run("--inputs", "s.npz")
    assert status == 1
    assert "mine" in err
    assert not (tmp_path / "low.mlir").exists()


def test_a_target_error_needs_inputs(run):
    assert run("--target-error", "0.1") == (2, "", "xla-amp: --target-error needs --inputs\n")


def lowered(function, *arguments):
    return parse(jax.jit(function).lower(*arguments).as_text().encode())


def kept(converted) -> list[str]:
    return [each.operation for each in converted.report.operations if each.why.startswith("sample inputs")]


def test_smaller_errors_keep_more_of_a_chain_without_a_cliff():
    program, found = lowered(chain, X, *LAYERS), []
    for share in (1.1, 0.8, 0.5):
        if not found:
            whole = autocast(program, sample_inputs=(X, *LAYERS)).achieved.error
        converted = autocast(program, sample_inputs=(X, *LAYERS), max_error=share * whole)
        assert converted.achieved.error <= share * whole
        found.append(len(kept(converted)))
    assert found[0] == 0 < found[1] < found[2] < len(LAYERS)


def test_a_rule_without_effect_is_told():
    with pytest.warns(RuleWarning, match="tanh"):
        autocast(lowered(chain, X, LAYERS[0]), rules={"tanh": "fp32"}, sample_inputs=(X, LAYERS[0]), max_error=0.1)


def test_an_error_that_no_plan_keeps_or_that_nothing_measures_is_refused():
    program = lowered(chain, X, LAYERS[0])
    with pytest.raises(TargetError, match=r"max_error=0.1.*sample_inputs"):
        autocast(program, max_error=0.1)
    with pytest.raises(TargetError, match=r"max_error=0.1.*the achieved error is inf"):
        autocast(program, sample_inputs=(math.nan * X, LAYERS[0]), max_error=0.1)
    with pytest.raises(SearchError, match="max_error = 0: expected a positive relative error"):
        autocast(program, sample_inputs=(X, LAYERS[0]), max_error=0)
    with pytest.raises(ModuleError, match=r"the samples are 3 arrays; .*keep_unused=True"):
        autocast(program, sample_inputs=(X, *LAYERS[:2]))


def test_a_result_that_is_zero_but_for_rounding_is_not_judged():
    def step(x, w, b):  # the mean of `y` is zero, so the gradient of a bias before the norm is, too
        def loss(b):
            y = x @ w + b
            return jnp.mean((y - y.mean(0)) ** 2)

        return jax.value_and_grad(loss)(b)

    found = autocast(lowered(step, X, W, W[0]), sample_inputs=(X, W, W[0]), max_error=1e-2)
    assert found.achieved.not_judged == ("result[1]",)
    assert 0 < found.achieved.error < 1e-2
    assert found.achieved.rounding < 1e-5
    assert not kept(found)


def test_the_last_quarter_of_the_samples_only_checks():
    program = lowered(chain, X, *LAYERS)
    samples = [(RNG.standard_normal((16, 16)).astype(np.float32), *LAYERS) for _ in range(3)]
    errors = [autocast(program, sample_inputs=each).achieved.error for each in samples]
    worst = (1.5 * np.ones((16, 16), np.float32), *(np.abs(each) for each in LAYERS))  # of one sign: nothing cancels
    found = autocast(program, sample_inputs=[*samples, worst], max_error=1.01 * max(errors))
    assert [error for error, _ in found.achieved.samples[:3]] == errors
    assert found.achieved.samples[3][0] < max(errors)


# Without an error: what is finite stays finite.  2**14 times a tanh is in the range of float16 (65504), eight
# times as much is not.


def plain(x):
    return (jnp.tanh(x @ W) * 2.0**14 * x[:1, :1]) @ W * 2.0**-14


def in_a_loop(x):
    return lax.fori_loop(0, 2, lambda _, h: h.at[0, 0].set(x[0, 0]) + plain(h), x)


def in_a_function(x):
    inner = jax.jit(plain)
    return inner(x) + inner(2 * x)


def in_a_branch(x):
    return lax.cond(x[0, 0] > -1e9, plain, lambda x: x @ W, x)


@pytest.mark.parametrize("function", [plain, in_a_loop, in_a_function, in_a_branch], ids=lambda each: each.__name__)
def test_what_overflows_stays_wherever_it_is(function):
    quiet, loud = (X.copy() for _ in range(2))
    quiet[0, 0], loud[0, 0] = 0.5, 8.0
    program = lowered(function, X)
    assert kept(autocast(program, dtype="float16", sample_inputs=(quiet,))) == []
    for samples in ((loud,), [(quiet,), (loud,)]):  # the worst of several samples counts
        converted = autocast(program, dtype="float16", sample_inputs=samples)
        assert set(kept(converted)) == {"dot_general"}
        assert converted.achieved.error < 0.01
    assert kept(autocast(program, sample_inputs=(loud,))) == []  # the range of bfloat16 is that of float32
