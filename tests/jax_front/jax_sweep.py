"""Call every public function of JAX's libraries with `autocast` and without, and write docs/lists/jax_functions.md.

    python tests/jax_front/jax_sweep.py [--show] [--modules jax.nn jax.image]

Each function runs with float32 arguments: forward, and backward where it has a gradient.  Its arguments come from
`SPECIAL`, or are the first of `TEMPLATES` with which it gives finite numbers.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import inspect
import pathlib
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xla_amp.jax import autocast

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "lists" / "jax_functions.md"
MODULES = (
    "jax.numpy.linalg", "jax.numpy.fft", "jax.scipy.linalg", "jax.scipy.special", "jax.scipy.signal",
    "jax.scipy.ndimage", "jax.scipy.interpolate", "jax.scipy.optimize", "jax.scipy.fft", "jax.scipy.cluster.vq",
    "jax.scipy.integrate", "jax.scipy.sparse.linalg", "jax.scipy.stats", "jax.image", "jax.random", "jax.nn",
    "jax.nn.initializers", "jax.lax.linalg",
)  # fmt: skip
LOW = 2.0**-6
"""Bound of the error where products run in bfloat16, relative to the greatest number: four of its roundings."""
_HEAD = """# JAX's libraries under autocast

Every public function of {modules} is called with and without `autocast(policy="tpu")`, on float32 arguments, forward
and backward. {same} of {all} calls are the same bit for bit: the function has no matrix product, or asks for float32.
The others are below. The error is the greatest difference, relative to the greatest number of the result.

`tests/jax_front/jax_sweep.py` makes this list.
"""


class Row(NamedTuple):
    """One function in one direction."""

    function: str
    direction: str
    low: int
    """Contractions that ran low."""
    error: float
    same_dtypes: bool


def _values() -> dict[str, Any]:
    random = np.random.default_rng(0)
    root = random.standard_normal((6, 6))
    numbers = {
        "matrix": random.standard_normal((6, 6)),
        "positive": root @ root.T / 6 + np.eye(6),
        "tall": random.standard_normal((6, 3)),
        "vector": random.standard_normal(6),
        "signal": random.standard_normal(64),
        "image": random.standard_normal((1, 6, 6, 3)),
        "p": random.uniform(0.2, 0.8, 6),
        "q": random.uniform(1.2, 2.8, 6),
        "heads": random.standard_normal((2, 16, 4, 8)),
        "big": 1000 + random.standard_normal((1, 6, 6, 3)),
    }
    return {name: jnp.asarray(value, jnp.float32) for name, value in numbers.items()}


V = _values()
KEY = jax.random.key(0)
M, S, B, X, P, Q = (V[name] for name in ("matrix", "positive", "tall", "vector", "p", "q"))
N = jnp.arange(1, 7)
TEMPLATES: dict[str, Sequence[tuple[Any, ...]]] = {
    "linalg": ((S,), (S, B), (S, X), (X,), (6,), (S, S), (X, X), (X[:5], X), (S, S, S), (B, X[:3], S)),
    "special": ((P,), (P, Q), (P, Q, P), (N, P), (P, Q, Q, P), (N, Q), (6,)),
    "stats": ((P,), (P, Q), (P, Q, Q), (P, Q, Q, P), (N, P), (N, 6, P), (N, Q, Q), (N, 6, Q, Q), (P, -Q, Q)),
    "random": ((KEY,), (KEY, P), (KEY, (6,)), (KEY, Q, Q), (KEY, Q, (6,)), (KEY, Q), (KEY, 6, P), (KEY, P, Q, (6,))),
    "nn": ((X,), (S,), (KEY, (6, 6), jnp.float32)),
    "": ((S,), (X,), (X, X), (S, S), (V["signal"],), (V["signal"], V["signal"])),
}
"""Last part of a module's name, or "" -> arguments to try in turn."""
SPECIAL: dict[str, Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]] = {}
"""Function -> (call, arguments) where no template fits."""


def _special(name: str, *arguments: Any, **keywords: Any) -> None:
    def make() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        module, _, function = name.rpartition(".")
        return functools.partial(getattr(importlib.import_module(module), function), **keywords), arguments

    SPECIAL[name] = make


_SL, _SS, _LL = "jax.scipy.linalg.", "jax.scipy.stats.", "jax.lax.linalg."
_special("jax.numpy.linalg.cross", X[:3], X[3:])
_special("jax.numpy.linalg.lstsq", V["matrix"], B)
_special("jax.numpy.linalg.matrix_power", S, n=5)
_special("jax.numpy.linalg.multi_dot", [S, S, B])
_special("jax.numpy.linalg.tensorinv", S.reshape(2, 3, 6), ind=2)
_special("jax.numpy.linalg.tensorsolve", S, X)
_special("jax.numpy.linalg.tensordot", S, S, axes=1)
_special(_SL + "cho_solve", (jnp.linalg.cholesky(S), True), B)
_special(_SL + "lu_solve", jax.scipy.linalg.lu_factor(S), B)
_special(_SL + "eigh_tridiagonal", P, P[:5], eigvals_only=True)
_special(_SL + "expm_frechet", S, M)
_special(_SL + "funm", S, func=jnp.tanh, disp=False)
_special(_SL + "rsf2csf", M, S)
_special(_SL + "qr_multiply", M, B)
_special(_SL + "solve_sylvester", S, S, M)
_special(_SL + "convolution_matrix", X, n=4)
_special(_SL + "leslie", P, P[:5])
_special("jax.scipy.special.bessel_jn", P, v=4)
_special("jax.scipy.special.bernoulli", n=6)
_special("jax.scipy.special.multigammaln", 3 + P, d=3)
_special("jax.scipy.special.sph_harm_y", N[:2], N[:2], P[:2], P[:2], n_max=3)
_special("jax.scipy.signal.convolve2d", M, M)
_special("jax.scipy.signal.correlate2d", M, M)
_special("jax.scipy.signal.stft", V["signal"], nperseg=16)
_special("jax.scipy.signal.istft", jax.scipy.signal.stft(V["signal"], nperseg=16)[2], nperseg=16)
_special("jax.scipy.ndimage.map_coordinates", M, [Q, Q], order=1)
_special("jax.scipy.optimize.minimize", lambda x: jnp.sum((S @ x - 1) ** 2), X, method="BFGS")
_special("jax.scipy.cluster.vq.vq", M, S)
for _solver in ("bicgstab", "cg", "gmres"):
    _special("jax.scipy.sparse.linalg." + _solver, S, X)
_special("jax.image.resize", V["big"], shape=(1, 9, 4, 3), method="cubic")
_special(
    "jax.image.scale_and_translate",
    V["big"],
    shape=(1, 9, 4, 3),
    spatial_dims=(1, 2),
    scale=jnp.array([1.5, 0.7]),
    translation=jnp.array([0.2, 0.1]),
    method="linear",
)
_special("jax.random.multivariate_normal", KEY, X, S)
_special("jax.random.orthogonal", KEY, n=6)
_special("jax.random.ball", KEY, d=3)
_special("jax.random.choice", KEY, X)
_special("jax.random.permutation", KEY, X)
_special("jax.random.randint", KEY, shape=(6,), minval=0, maxval=9)
_special("jax.random.triangular", KEY, P, Q, 2 + Q)
_special("jax.random.truncated_normal", KEY, -Q, Q)
_special("jax.random.generalized_normal", KEY, p=1.5, shape=(6,))
_special("jax.random.multinomial", KEY, 6, P)
_special("jax.random.fold_in", KEY, data=3)
_special("jax.nn.dot_product_attention", V["heads"], V["heads"], V["heads"], is_causal=True)
_special("jax.nn.one_hot", N, num_classes=9)
_special("jax.nn.scaled_matmul", *(jnp.ones((1, 32, n), jnp.float32) for n in (32, 32, 1, 1)))
_special("jax.nn.initializers.delta_orthogonal", KEY, (3, 6, 6))
_special("jax.scipy.stats.dirichlet.pdf", P / P.sum(), Q)
_special("jax.scipy.stats.dirichlet.logpdf", P / P.sum(), Q)
_special("jax.scipy.stats.multinomial.pmf", N, 21, P / P.sum())
_special("jax.scipy.stats.multinomial.logpmf", N, 21, P / P.sum())
_special("jax.scipy.stats.multivariate_normal.pdf", B.T, X, S)
_special("jax.scipy.stats.multivariate_normal.logpdf", B.T, X, S)
_special(_LL + "cholesky_update", jnp.linalg.cholesky(S), X)
_special(_LL + "householder_product", B, P[:3])
_special(_LL + "ormqr", B, P[:3], B)
_special(_LL + "lu_pivots_to_permutation", jnp.arange(6, dtype=jnp.int32), permutation_size=6)
_special(_LL + "triangular_solve", S, B, left_side=True, lower=True)
_special(_LL + "tridiagonal_solve", P, 4 + P, P, B)
_special(_LL + "symmetric_product", B, S)

WORSE = {
    ("jax.numpy.linalg.matrix_power", "backward"): "nine products in a row, of which each rounds the last one's result",
    ("jax.scipy.optimize.minimize", "forward"): "the function to minimize is the program's own and has a matrix "
    "product: the search takes other steps",
}
"""(Function, direction) -> why its error is beyond `LOW`."""
NO_GRADIENT = {
    "jax.scipy.special.expn": "as with `jax.grad(jax.jit(f))`, which JAX refuses: its rule of a derivative reads a "
    "traced argument from outside",
}
"""Functions whose gradient fails under `autocast`."""
_special("jax.numpy.fft.fftfreq", n=6)
_special("jax.numpy.fft.rfftfreq", n=6)
_special(_SL + "hadamard", n=8)
_special("jax.scipy.special.zeta", Q, 1 + Q)
_special(_SS + "bernoulli.logpmf", N % 2, P)
_special(_SS + "bernoulli.ppf", P, Q / 4)
_special(_SS + "pareto.logcdf", 2 + Q, Q)
_special("jax.nn.log1mexp", Q)

NOT_CALLED = {
    "jax.nn.initializers.constant": "makes an initializer that computes nothing",
    "jax.nn.initializers.variance_scaling": "makes an initializer; the others here are made by it",
    "jax.nn.get_scaled_dot_general_config": "makes a configuration",
    "jax.nn.scaled_dot_general": "its operands are already quantized",
    "jax.nn.scaled_matmul": "its operands are already quantized",
    "jax.random.PRNGKey": "makes a key",
    "jax.random.key": "makes a key",
    "jax.random.key_dtype": "makes a dtype",
    "jax.random.key_impl": "reads a key",
    "jax.random.wrap_key_data": "makes a key",
    "jax.random.clone": "makes a key",
    "jax.nn.identity": "returns its argument",
    "jax.nn.initializers.Initializer": "is a type",
}
"""Functions that are not called, with the reason."""


def functions(modules: Sequence[str]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The public functions of the modules by name; of `jax.scipy.stats` also those of its distributions."""
    for name in modules:
        module = importlib.import_module(name)
        for attribute in sorted(vars(module)):
            value = getattr(module, attribute)
            if attribute.startswith("_") or f"{name}.{attribute}" in NOT_CALLED:
                continue
            if inspect.ismodule(value):
                if name == "jax.scipy.stats":
                    yield from functions([f"{name}.{attribute}"])
            elif callable(value) and not inspect.isclass(value):
                yield f"{name}.{attribute}", value


def call(name: str, function: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """A function of arrays, and arrays with which it gives finite numbers; None if no arguments fit."""
    if name in SPECIAL:
        return _of_arrays(*SPECIAL[name]())
    if name.startswith("jax.nn.initializers."):
        with contextlib.suppress(TypeError):
            function = function()
    parts = name.split(".")
    family = next((part for part in reversed(parts[:-1]) if part in TEMPLATES), "")
    for arguments in TEMPLATES["nn" if "initializers" in parts else family]:
        try:
            found = _of_arrays(function, arguments)
            leaves = [leaf for leaf in jax.tree.leaves(found[0](*found[1])) if hasattr(leaf, "dtype")]
            if leaves and all(_is_finite(leaf) for leaf in leaves):
                return found
        except Exception:  # these arguments do not fit
            continue
    return None


def _of_arrays(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    leaves, tree = jax.tree.flatten(arguments)
    where = [index for index, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]

    def of_arrays(*arrays: Any) -> Any:
        given = list(leaves)
        for index, array in zip(where, arrays, strict=True):
            given[index] = array
        result = function(*jax.tree.unflatten(tree, given))
        return [leaf for leaf in jax.tree.leaves(result) if isinstance(leaf, jax.Array)]

    return of_arrays, tuple(leaves[index] for index in where)


def _is_finite(value: Any) -> bool:
    return not jnp.issubdtype(value.dtype, jnp.inexact) or bool(jnp.isfinite(value).all())


def _backward(function: Callable[..., Any], inner: Callable[..., Any], arrays: tuple[Any, ...]) -> Any:
    """The gradient of a weighted sum of the results of `inner`, or None; `function` is it without autocast."""
    wanted = tuple(i for i, array in enumerate(arrays) if jnp.issubdtype(array.dtype, jnp.floating))

    def total(*arrays: Any) -> Any:
        sums = [
            (jnp.real(leaf) * (1 + jnp.arange(leaf.size, dtype=jnp.float32).reshape(leaf.shape) / leaf.size)).sum()
            for leaf in inner(*arrays)
            if jnp.issubdtype(leaf.dtype, jnp.inexact)
        ]
        return sum(sums) if sums else None

    return jax.grad(total, wanted) if wanted else None


def rows(name: str, function: Callable[..., Any], arrays: tuple[Any, ...]) -> Iterator[Row]:
    """What `autocast` changes in a call, forward and backward."""
    low = autocast(function, policy="tpu")
    for direction in ("forward", "backward"):
        plain, cast = function, low
        if direction == "backward":
            if name in NO_GRADIENT:
                continue
            plain, cast = (_backward(function, inner, arrays) for inner in (function, low))
            if plain is None:
                continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                text = str(jax.make_jaxpr(plain)(*arrays))
            except Exception:  # it has no gradient
                continue
            if str(jax.make_jaxpr(cast)(*arrays)) == text:
                yield Row(name, direction, 0, 0.0, True)
                continue
            expected, got = jax.jit(plain)(*arrays), jax.jit(cast)(*arrays)
            report = autocast(plain, policy="tpu").report(*arrays)
        same = jax.tree.map(lambda x: x.dtype, expected) == jax.tree.map(lambda x: x.dtype, got)
        pairs = zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True)
        yield Row(name, direction, sum(line.count for line in report.low), max(_error(*p) for p in pairs), same)


def _error(expected: Any, got: Any) -> float:
    expected, got = np.asarray(expected), np.asarray(got)
    different = (expected != got) & ~(np.isnan(expected) & np.isnan(got))
    if not different.any():
        return 0.0
    if not np.issubdtype(expected.dtype, np.inexact):
        return np.inf
    return float(np.abs(expected - got)[different].max() / np.abs(expected).max())


def sweep(modules: Sequence[str] = MODULES, each: int = 1) -> tuple[list[Row], list[str]]:
    """The rows of every `each`-th function of the modules, and the names of functions for which no arguments fit."""
    found: list[Row] = []
    missing = []
    for name, function in list(functions(modules))[::each]:
        made = call(name, function)
        if made is None:
            missing.append(name)
            continue
        try:
            found += rows(name, *made)
        except Exception as error:
            error.add_note(f"in {name}")
            raise
    return found, missing


def beyond_bound(found: Sequence[Row]) -> list[Row]:
    """Rows with another dtype, or with a greater error than low products explain and without a reason in `WORSE`."""
    return [
        row
        for row in found
        if not row.same_dtypes
        or (row.error > (LOW if row.low else 0) and not (row.low and (row.function, row.direction) in WORSE))
    ]


def page(found: list[Row]) -> str:
    """The page with these rows."""
    changed = [row for row in found if row.error or not row.same_dtypes]
    names = ", ".join(f"`{name}`" for name in MODULES)
    head = _HEAD.format(modules=names, same=len(found) - len(changed), all=len(found))
    table = ["| Function | Direction | Low products | Error | |", "| --- | --- | --- | --- | --- |"]
    for row in changed:
        error = "other steps" if np.isinf(row.error) else f"{row.error:.1e}"
        why = WORSE.get((row.function, row.direction), "")
        table.append(f"| `{row.function}` | {row.direction} | {row.low} | {error} | {why} |")
    notes = [f"- `{name}` has no gradient under `autocast`: {why}." for name, why in NO_GRADIENT.items()]
    left = ", ".join(f"`{name}` ({why})" for name, why in NOT_CALLED.items())
    return "\n".join([head, *table, "", *notes, f"- Not called: {left}.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--modules", nargs="+", default=MODULES)
    parser.add_argument("--show", action="store_true", help="print instead of writing the page")
    options = parser.parse_args()
    found, missing = sweep(options.modules)
    wrong = beyond_bound(found)
    for line in (*(f"no arguments for {name}" for name in missing), *(f"beyond the bound: {row}" for row in wrong)):
        print(line)
    if options.show:
        print(page(found))
    else:
        PAGE.write_text(page(found))
    sys.exit(bool(missing or wrong))


if __name__ == "__main__":
    main()
