"""Programs on a mesh of 4 virtual CPU devices, in float32 on one device and under autocast on the mesh.

Each argument is MESH/PROGRAM.  Prints for each, as JSON, how far autocast's results and gradients are from float32's,
and what else differs (`compare`).
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, NamedSharding, auto_axes, explicit_axes, reshard
from jax.sharding import PartitionSpec as P

from xla_amp import hardware, stablehlo
from xla_amp.jax import LossScale, autocast, monitor, skip_nonfinite, statistics, value_and_grad

E, A = AxisType.Explicit, AxisType.Auto
PROCESSOR = hardware.processor()
hardware.processor = lambda: PROCESSOR._replace(flags=PROCESSOR.flags | {"avx512_bf16"})  # as in conftest
MESHES = {
    "data": ((4,), ("data",), (E,)),
    "tensor": ((4,), ("model",), (E,)),
    "explicit": ((2, 2), ("data", "model"), (E, E)),
    "auto": ((2, 2), ("data", "model"), (A, A)),
    "mixed": ((2, 2), ("data", "model"), (E, A)),
    "mixed tensor": ((2, 2), ("data", "model"), (A, E)),
}
"""Name -> extents, axes and their types."""
WIDTH, HIDDEN, HEADS, HEAD, BATCH, LENGTH = 32, 64, 4, 8, 8, 16


def axes(kind=None):
    """Axes of the mesh around, or those of a type."""
    mesh = jax.sharding.get_abstract_mesh()
    return {a for a, each in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind in (None, each)}


def spec(*names, among=None):
    """A partition of the axes of the mesh around."""
    among = axes() if among is None else among
    return P(*(name if name in among else None for name in names))


def product(equation, x, w, *names):
    """`jnp.einsum` with a sharding of its result, which explicit axes need where a split axis is summed."""
    return jnp.einsum(equation, x, w, out_sharding=spec(*names, among=axes(E)) if axes(E) else None)


def arguments(mesh):
    random = np.random.RandomState(0)

    def array(*shape, inputs, at=()):
        value = random.randn(*shape).astype(np.float32) / np.sqrt(inputs).astype(np.float32)
        return jax.device_put(value, NamedSharding(mesh, spec(*at)))

    weights = {
        "up": array(WIDTH, HIDDEN, inputs=WIDTH, at=(None, "model")),
        "down": array(HIDDEN, WIDTH, inputs=HIDDEN, at=("model",)),
        "bias": array(HIDDEN, inputs=9, at=("model",)),
        "qkv": array(WIDTH, 3, HEADS, HEAD, inputs=WIDTH, at=(None, None, "model")),
        "out": array(HEADS, HEAD, WIDTH, inputs=WIDTH, at=("model",)),
        "scale": array(WIDTH, inputs=9),
    }
    return weights, array(BATCH, LENGTH, WIDTH, inputs=1, at=("data",))


def perceptron(w, x):
    hidden = jax.nn.gelu(product("btd,df->btf", x, w["up"], "data", None, "model") + w["bias"])
    return product("btf,fd->btd", hidden, w["down"], "data")


def norm(x, scale):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * (1 + scale)


def projected(w, x):
    return product("btd,dnhk->nbthk", norm(x, w["scale"]), w["qkv"], None, "data", None, "model")


def attention(w, x):
    q, k, v = projected(w, x)
    scores = jnp.einsum("bqhk,bshk->bhqs", q, k) / np.sqrt(HEAD)
    scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, -1e9)
    return product("bqhk,hkd->bqd", jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(scores), v), w["out"], "data")


def block(w, x):
    x = x + attention(w, x)
    return x + perceptron(w, norm(x, w["scale"]))


def scanned(layer):
    def layers(w, x):
        stacked = jax.tree.map(lambda a: jnp.stack([a, 0.9 * a]), w)
        return lax.scan(lambda x, w: (layer(w, x), None), x, stacked)[0]

    return layers


def in_auto_axes(w, x):
    names = tuple(sorted(axes(E)))
    inside = auto_axes(block, axes=names, out_sharding=spec("data", among=axes(E))) if names else block
    return perceptron(w, inside(w, x))


def in_explicit_axes(w, x):
    if axes(E):
        return perceptron(w, x)
    at = {"up": spec(None, "model"), "down": spec("model"), "bias": spec("model")}
    used = {name: w[name] for name in at}
    return explicit_axes(perceptron, in_sharding=(at, spec("data")))(used, x)


def mapped(*manual):
    """The perceptron in a `jax.shard_map` that is manual over some axes of the mesh."""

    def function(w, x):
        names = axes() & set(manual) or axes()

        def shard(up, down, x):
            y = product("btf,fd->btd", jax.nn.gelu(x @ up), down, "data")
            return lax.psum(y, "model") if "model" in names else y

        def at(*places):
            return spec(*places, among=names)

        in_specs = at(None, "model"), at("model"), at("data")
        return jax.shard_map(shard, in_specs=in_specs, out_specs=at("data"), axis_names=names)(w["up"], w["down"], x)

    return function


def constrained(w, x):
    hidden = jax.nn.gelu(x @ w["up"])
    if axes(A):
        hidden = lax.with_sharding_constraint(hidden, spec("data", None, "model", among=axes(A)))
    return product("btf,fd->btd", hidden, w["down"], "data")


@jax.custom_vjp
def linear(x, w):
    return x @ w


linear.defvjp(
    lambda x, w: (x @ w, (x, w)),
    lambda saved, g: (product("btf,df->btd", g, saved[1], "data"), product("btd,btf->df", saved[0], g, None, "model")),
)


def with_own_derivative(w, x):
    return product("btf,fd->btd", jnp.tanh(linear(x, w["up"])), w["down"], "data")


def vectorized(w, x):
    def one(x):
        return product("tf,fd->td", jax.nn.gelu(x @ w["up"]), w["down"], None)

    return jax.vmap(one, spmd_axis_name=None if axes(E) or "data" not in axes() else "data")(x)


def branched(w, x):
    return lax.cond(jnp.sum(w["scale"]) > -1e9, perceptron, lambda w, x: x, w, x)


def convolved(w, x):
    kernel = (reshard(w["up"], P()) if axes(E) else w["up"])[None, :, :WIDTH]
    return lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))


PROGRAMS = {
    "perceptron": perceptron,
    "block": block,
    "scan": scanned(block),
    "checkpoint": jax.checkpoint(block),
    "scan of checkpoint": scanned(jax.checkpoint(block)),
    "auto_axes": in_auto_axes,
    "explicit_axes": in_explicit_axes,
    "shard_map": mapped("data", "model"),
    "shard_map over data": mapped("data"),
    "shard_map over model": mapped("model"),
    "constraint": constrained,
    "custom_vjp": with_own_derivative,
    "vmap": vectorized,
    "cond": branched,
    "convolution": convolved,
}


def both(function, around, derivative):
    """Result and gradients; `around` (autocast or nothing) wraps the function or, with `derivative`, its gradient."""

    def loss(w, x):
        return jnp.mean(jnp.sin(function(w, x)))

    if derivative:
        return around(lambda w, x: (function(w, x), jax.grad(loss, (0, 1))(w, x)))
    return lambda w, x: (around(function)(w, x), jax.grad(around(loss), (0, 1))(w, x))


def distance(one, other):
    return float(np.linalg.norm(np.float32(one) - np.float32(other)) / (np.linalg.norm(np.float32(other)) + 1e-30))


def wide_products(text):
    """Types of the products of a program that read float32."""
    products = re.findall(r"stablehlo\.(?:dot_general|convolution)\b.*?: \((.*?)\) ->", text)
    assert products
    return [each for each in products if each.count("xbf16>") != 2]


def one_device():
    _, names, types = MESHES["explicit"]
    return jax.make_mesh((1, 1), names, axis_types=types, devices=jax.devices()[:1])


@functools.cache
def exactly(program):
    """Result and gradients in float32 on one device, to compare those of each mesh with."""
    with jax.set_mesh(alone := one_device()):
        return jax.device_get(jax.jit(both(PROGRAMS[program], lambda f: f, False))(*arguments(alone)))


def compare(program, mesh):
    """For autocast around a function and around its gradient: errors, and results whose sharding is another one."""
    function, exact, found = PROGRAMS[program], exactly(program), {}
    with jax.set_mesh(mesh):
        args = arguments(mesh)
        plain = jax.jit(both(function, lambda f: f, False))(*args)
        ways = {
            "around the function": both(function, autocast, False),
            "around the gradient": both(function, autocast, True),
        }
        if program == "block" and mesh.axis_types in ((E, E), (A, A)):
            exported = jax.export.export(jax.jit(both(function, lambda f: f, False)))(*args)
            ways["as StableHLO"] = stablehlo.autocast(exported).program.exported.call
        for way, run in ways.items():
            lowered = jax.jit(run).lower(*args)
            got = lowered.compile()(*args)
            pairs = [*zip(jax.tree.leaves(got), jax.tree.leaves(plain), strict=True)]
            moved = [
                f"{jax.typeof(one)} {one.sharding.spec}, not {jax.typeof(other)} {other.sharding.spec}"
                for one, other in pairs
                if not one.sharding.is_equivalent_to(other.sharding, one.ndim)
                or jax.typeof(one).sharding != jax.typeof(other).sharding
            ]
            read = [np.any(value) for value in jax.tree.leaves(exact)]
            errors = [distance(*each) for each in zip(jax.tree.leaves(got), jax.tree.leaves(exact), strict=True)]
            kept = [error for error, is_read in zip(errors, read, strict=True) if is_read]
            found[way] = {"errors": [min(kept), max(kept)], "moved": moved, "wide": wide_products(lowered.as_text())}
        found["eagerly"] = {"errors": [distance(autocast(function)(*args), exact[0])] * 2, "moved": [], "wide": []}
    return found


@functools.cache
def train(mesh):
    """Three steps in float16 with a loss scale, of which the second overflows, watched by a monitor."""
    scaled = value_and_grad(autocast(lambda w, x: jnp.mean(jnp.square(block(w, x))), dtype="float16"))
    optimizer = skip_nonfinite(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)))

    @jax.jit
    def step(w, state, scale, x):
        value, grads, finite, new_scale = scaled(scale, w, x)
        updates, state = optimizer.update(grads, state, w, finite=finite)
        found = statistics(grads, loss=value, loss_scale=scale, skipped=~state.finite)
        return optax.apply_updates(w, updates), state, new_scale, value, found

    with jax.set_mesh(mesh):
        w, x = arguments(mesh)
        state, scale = optimizer.init(w), LossScale.dynamic(1024.0)
        recorder, weights, values = monitor(), [w], []
        for number in range(3):
            w, state, scale, value, found = step(w, state, scale, x * jnp.where(number == 1, jnp.inf, 1.0))
            recorder.record(found)
            weights.append(w)
            values.append(float(value))
        same = all(jax.tree.leaves(jax.tree.map(np.array_equal, weights[1], weights[2])))
        moved = jax.tree.map(lambda a, b: not a.sharding.is_equivalent_to(b.sharding, a.ndim), weights[0], w)
        steps = recorder.read().steps
    return {
        "scale": float(scale.value),
        "skipped": int(scale.skipped),
        "unchanged": same,
        "moved": [name for name, each in moved.items() if each],
        "losses": [values[0], values[2]],
        "watched": [each.loss for each in steps],
        "norms": [steps[0].gradient_norm, steps[2].gradient_norm],
    }


def main(*places):
    report = {}
    for place in places:
        name, program = place.split("/")
        extents, names, types = MESHES[name]
        mesh = jax.make_mesh(extents, names, axis_types=types)
        if program == "training":
            report[place] = {"mesh": train(mesh), "one": train(one_device())}
        else:
            report[place] = compare(program, mesh)
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
