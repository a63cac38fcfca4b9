"""`xla_amp.common.compiling`: plans are compiled quickly, and have the errors of optimized code."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xla_amp.common import compiling
from xla_amp.tools import search as plan_search
from xla_amp.tools.search.on_jax import JaxProgram


def loss(w, x):
    for _ in range(3):
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def searched(monkeypatch, flops: float) -> tuple[list[dict[str, object]], JaxProgram]:
    """A program, and the options of XLA that it compiles with, if work from `flops` on is optimized."""
    chosen, jit = [], jax.jit
    monkeypatch.setattr(compiling, "QUICK_FLOPS", flops)
    monkeypatch.setattr(jax, "jit", lambda *a, **k: chosen.append(k.get("compiler_options")) or jit(*a, **k))
    w = jax.random.normal(jax.random.key(0), (16, 16)) / 4
    program = JaxProgram(loss, [(w, jax.random.normal(jax.random.key(i), (8, 16))) for i in (1, 2, 3)], {0}, "bfloat16")
    program.look()
    program.candidates = plan_search.from_records(program.records(None))
    return chosen, program


def test_large_work_is_compiled_as_usual_and_the_errors_are_the_same(monkeypatch):
    # Forward and backward pass of three products.
    work = 3 * 3 * 2 * 8 * 16 * 16
    found = {}
    for flops in (work, work + 1):
        with monkeypatch.context() as patched:
            chosen, program = searched(patched, flops)
            plan = frozenset(each.name for each in program.candidates)
            found[flops] = program.evaluate(plan, 1)
            assert program.evaluate(frozenset(), 1) == {"loss": 0, "gradients": 0}
        assert len(chosen) == 3, "float32, the plan, and the plan without a low candidate"
        quick = flops > work and jax.default_backend() == "cpu"
        assert all(bool(each) == quick for each in chosen)
    optimized, quick = (np.array(list(errors.values())) for errors in found.values())
    assert np.all(optimized > 0)
    np.testing.assert_allclose(quick, optimized, rtol=1e-3)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_other_platforms_have_options_of_their_own(platform):
    assert compiling.quick_options(platform, 1.0) == {}
