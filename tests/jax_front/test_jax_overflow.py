"""find_overflow for JAX: functions with a known first inf or NaN, through every transformation; what it did not see."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import COMPILED, jax_events
from jax import lax
from jax.sharding import PartitionSpec as P

import xla_amp
from xla_amp.errors import StepError
from xla_amp.jax import autocast, find_overflow

MESH = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))


def log_of_minus(x):
    return jnp.sum(jnp.log(-x))


@jax.custom_vjp
def bad_backward(x):
    return jnp.sin(x)


bad_backward.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g / (x - x),))


@jax.custom_jvp
def bad_value(x):
    return jnp.log(x - x)


bad_value.defjvps(lambda t, out, x: t)


def remat(x):
    return jax.checkpoint(bad_backward)(x)


def scanned(x):
    def body(carry, _):
        with jax.named_scope("layer"):
            carry = carry * 100
        return carry, jnp.exp(carry)

    return lax.scan(body, x, None, length=4)


def reversed_scan(x):
    return lax.scan(lambda carry, row: (carry, 1 / row), x, jnp.array([1.0, 0.0, 2.0]), reverse=True)


def squared(x):
    return lax.while_loop(lambda c: c < 1e30, lambda c: c * c, x)


def one_step(x):
    return lax.cond(x[0] > 0, jnp.log, jnp.sqrt, -x)


def root(x):
    return jnp.sum(jnp.where(x > 0, jnp.sqrt(x), 0.0))


def sharded(x):
    return jax.shard_map(lambda x: lax.psum(jnp.log(x), "d"), mesh=MESH, in_specs=P("d"), out_specs=P())(x)


ONES = np.ones(3, np.float32)
CASES = [
    ("value", log_of_minus, ONES, ("log", "nan", "", ""), "jnp.log(-x)"),
    ("jit", jax.jit(log_of_minus), ONES, ("log", "nan", "", ""), "jnp.log(-x)"),
    ("gradient", jax.grad(root), ONES * 0, ("div", "inf", "forward", ""), "jnp.sqrt(x)"),
    ("jitted gradient", jax.jit(jax.grad(root)), ONES * 0, ("div", "inf", "forward", ""), "jnp.sqrt(x)"),
    ("remat", jax.grad(remat), np.float32(2), ("div", "inf", "backward", ""), "checkpoint(bad"),
    ("custom_jvp", jax.jit(bad_value), np.float32(2), ("log", "inf", "", ""), "x - x"),
    ("scan", scanned, np.float32(0.01), ("exp", "inf", "", "iteration 1 of scan"), "exp(carry)"),
    ("reversed scan", reversed_scan, np.float32(0), ("div", "inf", "", "iteration 1 of scan"), "1 / row"),
    ("while", jax.jit(squared), np.float32(-1e25), ("mul", "inf", "", "iteration 0 of while"), "c * c"),
    ("cond", jax.jit(one_step), ONES, ("log", "nan", "", ""), None),
    ("shard_map", sharded, ONES, None, None),
    ("shard_map under jit", jax.jit(sharded), -ONES, ("log", "nan", "", ""), "jnp.log(x)"),
    ("vmap", jax.vmap(log_of_minus), ONES[None], ("log", "nan", "", ""), "jnp.log(-x)"),
]


@pytest.mark.parametrize(("function", "x", "expected", "line"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_what_is_found(function, x, expected, line):
    report = find_overflow(function, jnp.asarray(x))
    if expected is None:
        assert report.first is None
        assert "no operation that was watched made one" in str(report)
        return
    place = report.first.place
    assert (place.operation, report.first.made, place.phase, place.iteration) == expected
    assert report.results
    if line is not None:
        path, _, number = place.location.rpartition(":")
        assert path == __file__
        with open(path) as source:
            assert line in source.read().splitlines()[int(number) - 1]


def test_operands_and_scopes():
    report = find_overflow(scanned, jnp.float32(0.01))
    (operand,) = report.first.inputs
    assert (operand.dtype, operand.shape, operand.largest) == ("float32", (), 100.0)
    assert report.producers[-1].place.module == ""
    assert report.operations == 8
    text = str(report)
    assert "operand 0: float32 scalar, magnitudes 100 to 100" in text
    assert "exp made inf, iteration 1 of scan" in text
    assert "result: float32, which holds magnitudes up to 3.4e+38" in text
    assert "Which results are not finite?\n  1: result[1]" in text


def test_the_program_that_autocast_makes_is_watched():
    x = jnp.full((8, 8), 300.0)

    def loss(w, x):
        with jax.named_scope("head"):
            return jnp.sum(x @ w)

    assert find_overflow(jax.jit(jax.value_and_grad(loss)), x, x).first is None
    report = find_overflow(jax.jit(jax.value_and_grad(autocast(loss, dtype=jnp.float16))), x, x)
    assert (report.first.made, report.first.result, report.first.place.module) == ("inf", "float16", "head")
    assert report.first.inputs[0].dtype == "float16"


def test_each_lane_of_a_batched_loop_has_its_own_condition():
    x = jnp.array([3.0, 10.0])  # one more iteration makes the second lane infinite
    report = find_overflow(jax.vmap(squared), x)
    assert (report.first.place.iteration, report.results) == ("iteration 5 of while", ())


def test_lanes_of_a_batched_loop_on_an_explicit_mesh():
    with jax.set_mesh(jax.make_mesh((1, 1), ("data", "model"))):
        x = jax.device_put(jnp.full((4, 8), -1e25), P("data", "model"))
        report = find_overflow(jax.vmap(lambda row: lax.while_loop(lambda c: c[0] < 1e30, lambda c: c * c, row)), x)
    assert report.first.place.iteration == "iteration 0 of while"


def test_what_is_given_is_told():
    report = find_overflow(lambda tree: tree["x"] * 2, {"x": jnp.array([jnp.nan, 1.0])})
    assert report.first is None
    assert report.arguments == ("args[0][0]['x']",)
    assert "no operation that was watched made one" not in str(report)
    assert "mul passed on nan" in str(report)


def test_what_was_not_watched_is_told():
    def host(x):
        return jax.pure_callback(np.float32, jax.ShapeDtypeStruct((), jnp.float32), x)

    (note,) = find_overflow(host, jnp.float32(1)).not_watched
    assert note.startswith("the inside of pure_callback (")
    assert __file__ in note
    assert "not watched: the inside of pure_callback" in str(find_overflow(host, jnp.float32(1)))


def test_what_is_refused():
    ahead = jax.jit(jnp.log).lower(ONES).compile()
    with pytest.raises(StepError, match="compiled ahead of time"):
        find_overflow(ahead, ONES)
    with pytest.raises(StepError, match="no JAX operation that can be watched"):
        find_overflow(lambda x: x + 1, 3)
    with pytest.raises(StepError, match="reads values while it runs"):
        find_overflow(lambda x: jnp.log(x) if jnp.sum(x) > 1 else x, ONES)
    with pytest.raises(StepError, match="inside of a function that JAX traces"):
        jax.jit(lambda x: find_overflow(jnp.log, x))(1.0)
    with pytest.raises(TypeError, match="expects a function, got 3"):
        find_overflow(3)
    with pytest.raises(StepError, match=r"xla_amp\.jax\.find_overflow"):
        xla_amp.find_overflow(log_of_minus, jnp.ones(3))


def test_objects_of_nnx_keep_their_state():
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self):
            self.layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
            self.count = nnx.Variable(jnp.zeros(()))
            self.bound = nnx.Variable(jnp.zeros(()))

        def __call__(self, x):
            self.count[...] += 1
            self.bound[...] = jnp.log(self.layer(x) * 0).max()
            return self.bound[...]

    model = Model()
    report = find_overflow(nnx.jit(lambda model, x: model(x)), model, jnp.ones((1, 2)))
    assert report.first.place.operation == "log"
    assert float(model.count[...]) == 0
    report = find_overflow(lambda parts, x: (x, parts[0](x)), [model], x=jnp.ones((1, 2)))
    assert report.results == ("result[1]", "args[0][0].bound")


def test_a_mutable_array_is_looked_into():
    def step(x):
        cell = jax.new_ref(x * 2)
        cell[...] = cell[...] / 0
        return cell[...]

    assert find_overflow(step, jnp.ones(4)).first.place.operation == "div"


def test_a_second_search_compiles_no_operation_again():
    step = jax.jit(jax.grad(lambda x: jnp.sum(jnp.tanh(x @ x))))
    with jax_events() as events:
        assert find_overflow(step, jnp.ones((3, 3))).first is None
        before = events.count(COMPILED)
        assert find_overflow(step, jnp.ones((3, 3))).operations
    assert events.count(COMPILED) == before > 0
