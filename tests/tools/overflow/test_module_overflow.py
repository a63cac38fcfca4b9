"""find_overflow for StableHLO modules: loops, branches, calls, library calls; ``xla-amp inspect --overflow``."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xla_amp import cli
from xla_amp.errors import ModuleError
from xla_amp.stablehlo import autocast, find_overflow


def looped(x):
    def body(carry, _):
        with jax.named_scope("layer"):
            carry = carry * 100
        return carry, jnp.exp(carry)

    last, steps = jax.lax.scan(body, x, None, length=4)
    return jax.lax.cond(last > 1e9, lambda: steps[0], lambda: jnp.log(-last))


def lowered(function, *arguments):
    return jax.jit(function).lower(*arguments)


SCALAR = np.float32(0.01)


def test_a_loop_names_its_iteration():
    report = find_overflow(lowered(looped, SCALAR), [SCALAR])
    place = report.first.place
    assert (place.operation, report.first.made, place.iteration) == ("exponential", "inf", "iteration 1 of while")
    assert report.first.inputs[0].largest == 100
    assert place.location.startswith(__file__)
    assert len(report.producers) == 4


def test_the_branch_that_runs():
    report = find_overflow(lowered(looped, SCALAR), [SCALAR])
    assert [each.place.operation for each in report.producers][-1] == "log"
    assert report.results == ("result 0",)


def test_what_autocast_makes_is_watched():
    program = lowered(lambda x, w: jnp.sum(x @ w), np.zeros((4, 8), np.float32), np.zeros((8, 4), np.float32))
    inputs = [np.full((4, 8), 1e5, np.float32), np.full((8, 4), 300, np.float32)]
    assert find_overflow(program, inputs).first is None
    report = find_overflow(autocast(program, policy="gpu"), inputs)
    assert (report.first.made, report.first.result, report.first.place.operation) == ("inf", "float16", "convert")
    assert report.first.element == (0, 0)


def test_library_calls_are_told():
    report = find_overflow(lowered(jnp.linalg.cholesky, np.eye(2, dtype=np.float32)), [np.eye(2, dtype=np.float32)])
    assert report.first is None
    assert any("custom_call" in each for each in report.not_watched)
    assert "not watched: the inside of custom_call" in str(report)


def test_what_is_given_and_what_does_not_fit():
    program = lowered(lambda x: x * 2, np.ones(2, np.float32))
    report = find_overflow(program, [np.array([np.nan, 1], np.float32)])
    assert report.first is None
    assert (report.arguments, report.passed_on.place.operation) == (("argument 0",), "multiply")
    with pytest.raises(ModuleError, match="takes 1 arguments"):
        find_overflow(program, [])


def test_the_command(tmp_path, capsys):
    path, npz = tmp_path / "program.mlir", tmp_path / "inputs.npz"
    path.write_text(lowered(looped, SCALAR).as_text())
    np.savez(npz, SCALAR)
    assert cli.main(["inspect", str(path), "--overflow", "--inputs", str(npz)]) == 1
    assert "exponential made inf, iteration 1 of while" in capsys.readouterr().out
    path.write_text(lowered(lambda x: x + 1, SCALAR).as_text())
    assert cli.main(["inspect", str(path), "--overflow", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["producers"] == []
