"""Names of JAX's functions and scopes decide dtypes: a test fails when JAX changes one, and says what to change."""

from __future__ import annotations

import contextlib
import importlib
import pathlib
import sys
from typing import get_args

import jax
import jax.numpy as jnp
import jax.scipy.special
import numpy as np
import pytest
from jax.extend.core import Primitive

import xla_amp
from xla_amp.jax import autocast, compat, rebind
from xla_amp.jax.decisions import request
from xla_amp.jax.higher_order.handlers import HIGHER_ORDER_RULES
from xla_amp.jax.low_primitives import described
from xla_amp.jax.primitives import PRIMITIVES, PrimitiveKind
from xla_amp.policy import op_catalog

MATRIX = jnp.eye(6) * 6 + jnp.outer(jnp.arange(6.0), jnp.arange(6.0)) / 6 + 0.37


def pullback(function):
    def run(x):
        out, back = jax.vjp(function, x)
        return back(out)

    return run


NAMED = {
    "qr": pullback(jnp.linalg.qr),
    "pascal": lambda x: x + jax.scipy.linalg.pascal(6),
    "invpascal": lambda x: x + jax.scipy.linalg.invpascal(6),
    "_multivariate_normal": lambda x: jax.random.multivariate_normal(jax.random.key(0), x[0], x, (3,)),
    "_owens_t_impl": lambda x: jax.scipy.special.owens_t(x, x),
}
DECIDED = {
    "cholesky": pullback(jnp.linalg.cholesky),
    "inv": pullback(jnp.linalg.inv),
    "solve": pullback(lambda x: jnp.linalg.solve(x, x + 1)),
    "lstsq": pullback(lambda x: jnp.linalg.lstsq(x, x + 1)[0]),
    "pinv": pullback(jnp.linalg.pinv),
    "svd": pullback(lambda x: jnp.linalg.svd(x, full_matrices=False)),
    "eigh": pullback(jnp.linalg.eigh),
    "lu": pullback(jax.scipy.linalg.lu),
    "expm": jax.scipy.linalg.expm,
    "polar": lambda x: jax.scipy.linalg.polar(x, method="svd"),
    "sqrtm": jax.scipy.linalg.sqrtm,
    "funm": lambda x: jax.scipy.linalg.funm(x, jnp.tanh, disp=False)[0],
    "expm_frechet": lambda x: jax.scipy.linalg.expm_frechet(x, x),
    "solve_sylvester": lambda x: jax.scipy.linalg.solve_sylvester(x, x, x),
    "qdwh": lambda x: jax.lax.linalg.qdwh(x)[0],
    "slogdet": pullback(lambda x: jnp.linalg.slogdet(x)[1]),
    "tensorinv": lambda x: jnp.linalg.tensorinv(x.reshape(2, 3, 6), ind=2),
    "cg": lambda x: jax.scipy.sparse.linalg.cg(x, x[0])[0],
    "polyfit": lambda x: jnp.polyfit(x[0], x[1], 2),
    "resize": lambda x: jax.image.resize(x, (6, 6), "cubic"),
    "rsf2csf": lambda x: jax.scipy.linalg.rsf2csf(x, x),
    "sph_harm_y": lambda x: jax.scipy.special.sph_harm_y(jnp.array([2]), jnp.array([1]), x[0, :1], x[1, :1], n_max=3),
}


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in compat.sub_jaxprs(eqn.params):
            yield from equations(inner)


def open_products(function):
    """The products of a program that ask for nothing and sum something: the policy may make them low."""
    jaxpr = jax.make_jaxpr(function)(MATRIX).jaxpr
    found = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "dot_general"]
    left_open = [eqn for eqn in found if not request(eqn, np.dtype(jnp.bfloat16))]
    return [e for e in left_open if not described(e.primitive, e.params, *(a.aval for a in e.invars)).sums_few]


def test_every_name_of_the_table_has_a_program():
    assert set(NAMED) == compat.NUMERICAL


@pytest.mark.parametrize("name", NAMED)
def test_functions_whose_products_need_float32(name):
    """Each name of the table is one of JAX's, and needed."""
    if name in ("invpascal", "_owens_t_impl") and jax.__version_info__ < (0, 10, 2):
        pytest.skip("JAX 0.10.2 and later")
    assert open_products(NAMED[name]), f"JAX's `{name}` asks for float32 itself: remove it from compat.NUMERICAL"
    found = list(equations(jax.make_jaxpr(NAMED[name])(MATRIX + 0).jaxpr))
    called = [inner.debug_info.func_src_info for eqn in found for inner in compat.sub_jaxprs(eqn.params)]
    assert any(map(compat.calls_numerical_function, found)), (
        f"JAX renamed `{name}` or moved it out of jax/_src: a product that needs float32 would be low. "
        f"Put its name among these into compat.NUMERICAL: {called}"
    )
    np.testing.assert_array_equal(
        *(jax.tree.leaves(jax.jit(each)(MATRIX))[0] for each in (NAMED[name], autocast(NAMED[name])))
    )


@pytest.mark.parametrize("name", DECIDED)
def test_functions_that_ask_for_float32_themselves(name):
    """The twin: these are in no table, because their precision, dtype or shape decides."""
    calls = [[function for _, function, _ in compat.frames(eqn)] for eqn in open_products(DECIDED[name])]
    assert not calls, (
        f"JAX's `{name}` has products without a precision: put the function into compat.NUMERICAL: {calls}"
    )


def test_a_function_of_the_user_may_have_such_a_name():
    @jax.jit
    def qr(x):
        return x @ x

    (call,) = jax.make_jaxpr(qr)(MATRIX).eqns
    assert not compat.calls_numerical_function(call)
    assert "bf16" in str(jax.make_jaxpr(autocast(qr))(MATRIX))


def test_scopes_of_differentiated_and_checkpointed_functions():
    """The analyses of training steps read these scopes."""

    def loss(x):
        return jnp.sum(jnp.sin(jnp.sin(x) @ x))

    found = list(equations(jax.make_jaxpr(jax.grad(jax.checkpoint(loss)))(MATRIX).jaxpr))
    scopes = sorted({f"{type(scope).__name__} {scope.name}" for eqn in found for scope in compat.name_stack(eqn)})
    for what, reads in {
        "compat.is_transpose_scope": compat.is_transpose_scope,
        "compat.is_derivative_scope": compat.is_derivative_scope,
        "compat.REMATTED": lambda scope: compat.REMATTED in str(scope.name).split("/"),
    }.items():
        seen = any(reads(scope) for eqn in found for scope in compat.name_stack(eqn))
        assert seen, f"JAX renamed a name scope: change {what} to the new name, which is one of {scopes}"


def test_files_of_the_lowerings_of_torch_operations():
    package = pathlib.Path(xla_amp.__file__).parent
    missing = [path for path in compat.LOWERINGS if not (package.parent / path).is_file()]
    assert not missing, f"change compat.LOWERINGS, or torch's default precision counts as a request; moved: {missing}"


def test_a_kind_of_primitive_with_jaxprs_has_a_form_and_a_rule():
    assert rebind.KINDS == HIGHER_ORDER_RULES.keys() <= set(get_args(PrimitiveKind))


WITHOUT_ROWS = (
    *(f"jax._src.pallas.{name}" for name in ("einshape", "fuser", "mosaic", "triton")),  # inside of kernels
    *(f"jax.experimental.{name}" for name in ("fused", "key_reuse", "mosaic", "multihost_utils", "rnn")),
    *(f"jax._src.{name}" for name in ("buffer_callback", "compute_on", "shard_alike", "tpu_custom_call")),
)
"""Modules whose primitives get their operands as they are written: other tests import some of them."""


def test_every_primitive_is_in_a_table():
    for module in ("jax.experimental.pallas", "jax.experimental.sparse", "jax.nn", "jax.random", "jax.scipy.linalg"):
        importlib.import_module(module)
    with contextlib.suppress(ImportError):  # not before JAX 0.12
        importlib.import_module("jax.experimental.overlap")
    named = [(name, module) for name, module in list(sys.modules.items()) if name.partition(".")[0] == "jax"]
    modules = [module for name, module in named if not name.startswith(WITHOUT_ROWS)]
    found = [each for module in modules for each in vars(module).values() if isinstance(each, Primitive)]
    names = {each.name for each in found}
    ours = {name for name in names if name.startswith("low_")}
    missing = names - ours - PRIMITIVES.keys() - op_catalog.catalogue().names["jaxpr"].keys()
    assert "random_gamma" in names
    assert not missing, "give each a row in xla_amp/jax/primitives.py, or an ATen name in policy/tables/classes.toml"
