"""Attention: forms' results against float64, choice of the form, growth of memory, programs of torch's operation.

Through autograd it is tested in tests/lazy/ops/test_composites.py.
"""

from __future__ import annotations

import dataclasses
import math
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import targets
import torch
from harness import lowering_of, sample, to_array

import xla_amp
from xla_amp import hardware
from xla_amp.errors import KernelWarning
from xla_amp.lowering import forms
from xla_amp.lowering.attention import blocked, cudnn, full_matrix, sdpa, splash
from xla_amp.lowering.attention.attention_call import Attention
from xla_amp.lowering.linalg import contraction
from xla_amp.lowering.operand import Permuted

RNG = np.random.default_rng(0)


def made(dtype: Any, batch: int, heads: int, shared: int, rows: int, columns: int, width: int, of_result: int) -> Any:
    """Query, key, value and the gradient of the output."""
    shapes = ((heads, rows, width), (shared, columns, width), (shared, columns, of_result), (heads, rows, of_result))
    return [jnp.asarray(RNG.uniform(-1, 1, (batch, *shape)), dtype) for shape in shapes]


def exact(arrays: Any, bias: Any, causal: bool, scale: float | None, kept: Any = 1.0) -> dict[str, np.ndarray]:
    """Attention and its gradients by their definitions, in float64; a fully masked row is zero."""
    query, key, value, grad = (np.asarray(x, np.float64) for x in arrays)
    groups = query.shape[1] // key.shape[1]
    wide_key, wide_value = (np.repeat(x, groups, 1) for x in (key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = scale * query @ wide_key.swapaxes(-1, -2)
    seen = np.ones(scores.shape, bool)
    if causal:
        seen = np.tril(seen)
    if bias is not None and bias.dtype == bool:
        seen = seen & bias
    elif bias is not None:
        scores = scores + np.asarray(bias, np.float64)
    weights = np.where(seen, np.exp(scores), 0)
    total = weights.sum(-1, keepdims=True)
    total = np.where(total == 0, 1, total)
    weights /= total
    output = weights * kept @ wide_value
    dweights = grad @ wide_value.swapaxes(-1, -2) * kept
    dscores = weights * (dweights - (grad * output).sum(-1, keepdims=True))

    def shared(x: np.ndarray) -> np.ndarray:
        return x.reshape(x.shape[0], key.shape[1], groups, *x.shape[2:]).sum(2)

    return {
        "output": output,
        "logsumexp": np.log(total)[..., 0],
        "query": scale * dscores @ wide_key,
        "key": shared(scale * dscores.swapaxes(-1, -2) @ query),
        "value": shared((weights * kept).swapaxes(-1, -2) @ grad),
    } | ({} if bias is None or bias.dtype == bool else {"bias": summed(dscores, bias.shape)})


def summed(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The sum over what a bias of `shape` was broadcast to."""
    x = x.sum(tuple(range(x.ndim - len(shape))))
    return x.sum(tuple(axis for axis, extent in enumerate(shape) if extent == 1), keepdims=True)


def computed(form: Any, call: Attention, grad: Any) -> dict[str, Any]:
    """The same results from a form, in one program, rounded where torch's operation rounds."""
    names = ("query", "key", "value", "bias", "rng")
    operands = [*(getattr(call, name) for name in names), grad]

    def both(*arrays: Any) -> Any:
        *given, last = (
            Permuted(x, operand.permutation) if isinstance(operand, Permuted) else x
            for x, operand in zip(arrays, operands, strict=True)
        )
        attention = dataclasses.replace(call, **dict(zip(names, given, strict=True)))
        output, logsumexp = form.forward(attention)
        output = output.astype(call.dtype)
        gradients = form.backward(attention, last, output, logsumexp, call.bias is not None)
        return output, logsumexp, *(None if x is None else x.astype(call.dtype) for x in gradients)

    results = jax.jit(both)(*(x.base if isinstance(x, Permuted) else x for x in operands))
    return dict(zip(("output", "logsumexp", *names[:4]), results, strict=True))


def agree(got: dict[str, Any], want: dict[str, np.ndarray], tolerances: tuple[float, float]) -> None:
    """Compare by the size of the expected values; logsumexp, which is always wide, with its own tolerance."""
    low, wide = tolerances
    for name, y in want.items():
        assert got[name].shape == y.shape, name
        error = np.abs(np.asarray(got[name], np.float64) - y).max() / max(1.0, np.abs(y).max())
        assert error < (wide if name == "logsumexp" else low), (name, error)


TOLERANCES = {jnp.float64: (1e-13, 1e-13), jnp.float32: (2e-6, 2e-6), jnp.bfloat16: (8e-3, 2e-6)}
"""dtype -> tolerance of results in that dtype, and of logsumexp; half an ulp of bfloat16 is 2e-3 to 4e-3."""

BIASES: dict[str, Any] = {
    "none": lambda *shape: None,
    "mask": lambda b, h, r, c: np.arange(r)[:, None] % 5 != np.arange(c) % 7,
    "a row sees nothing": lambda b, h, r, c: (np.arange(r)[:, None] != 3) & (RNG.random((b, 1, r, c)) < 0.7),
    "for each column": lambda b, h, r, c: RNG.uniform(-1, 1, (b, 1, 1, c)),
    "matrix": lambda b, h, r, c: RNG.uniform(-1, 1, (r, c)),
}


def case(dtype: Any, shape: tuple[int, ...], bias: str = "none", **options: Any) -> tuple[Attention, Any, Any]:
    """A call, the gradient of its output, and the results of both passes in float64."""
    query, key, value, grad = made(dtype, *shape)
    added = BIASES[bias](*(shape[index] for index in (0, 1, 3, 4)))
    low = None if added is None else jnp.asarray(added, bool if added.dtype == bool else dtype)
    call = Attention(query=query, key=key, value=value, bias=low, **options)
    want = exact((query, key, value, grad), None if low is None else np.asarray(low), call.causal, call.given_scale)
    return call, grad, want


@pytest.fixture(autouse=True)
def wide_numbers():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("form", [blocked, full_matrix])
@pytest.mark.parametrize(
    ("shape", "bias"),
    [  # batch, heads, key heads, rows, columns, features, features of the result
        ((1, 2, 2, 64, 48, 8, 8), "none"),  # whole blocks
        ((2, 2, 2, 53, 40, 8, 5), "matrix"),  # a part of a block
        ((1, 4, 2, 50, 70, 8, 8), "a row sees nothing"),
        ((1, 3, 1, 40, 9, 16, 4), "for each column"),
        ((1, 2, 2, 7, 90, 8, 8), "mask"),  # less than a block
    ],
)
def test_forward_and_backward(shape, bias, form, monkeypatch):
    monkeypatch.setattr(blocked, "BLOCK", 8)
    for dtype, causal in ((jnp.float64, form is full_matrix), (jnp.bfloat16, form is blocked)):
        call, grad, want = case(dtype, shape, bias, causal=causal, given_scale=0.4, platform="cpu")
        agree(computed(form, call, grad), want, TOLERANCES[dtype])


def test_a_permuted_operand_is_the_same_operand(monkeypatch):
    monkeypatch.setattr(blocked, "BLOCK", 8)
    call, grad, want = case(jnp.float64, (2, 2, 2, 20, 20, 8, 8), causal=True, platform="cpu")
    order = (0, 2, 1, 3)
    *operands, turned = (Permuted(x.transpose(order), order) for x in (call.query, call.key, call.value, grad))
    call = dataclasses.replace(call, **dict(zip(("query", "key", "value"), operands, strict=True)))
    for form, platform in ((blocked, "gpu"), (full_matrix, "tpu")):
        agree(computed(form, dataclasses.replace(call, platform=platform), turned), want, TOLERANCES[jnp.float64])


@pytest.mark.parametrize("form", [blocked, full_matrix])
def test_both_passes_drop_the_same_weights(form, monkeypatch):
    monkeypatch.setattr(blocked, "BLOCK", 8)
    rows, columns, dropout = 36, 16, 0.4
    query, key, _, _ = made(jnp.float64, 1, 2, 2, rows, columns, 8, 8)
    value = jnp.broadcast_to(jnp.eye(columns), (1, 2, columns, columns))
    grad = jnp.asarray(RNG.uniform(-1, 1, (1, 2, rows, columns)))
    call = Attention(query=query, key=key, value=value, dropout=dropout, rng=jax.random.key(3), platform="cpu")
    got = computed(form, call, grad)
    kept = np.asarray(got["output"] != 0) / (1 - dropout)
    assert 0.5 < (kept > 0).mean() < 0.7
    assert len({tuple(row) for row in kept[0, 0]}) > rows // 2  # the blocks draw their own
    want = exact((query, key, value, grad), None, False, None, kept)
    agree(got, want, TOLERANCES[jnp.float64])


@pytest.mark.parametrize(("form", "least", "most"), [(blocked, 3, 5), (full_matrix, 12, 17)])
def test_memory_is_linear_in_the_length_with_blocks_and_quadratic_without(form, least, most):
    counts = []
    for length in (1024, 4096):
        call = example(rows=length, columns=length, platform="cpu", heads=2)
        arrays = [jax.ShapeDtypeStruct(call.query.shape, call.dtype)] * 4

        def step(query: Any, key: Any, value: Any, grad: Any, call: Attention = call) -> Any:
            given = dataclasses.replace(call, query=query, key=key, value=value)
            return tuple(computed(form, given, grad).values())[:5]

        counts.append(jax.jit(step).lower(*arrays).compile().memory_analysis().temp_size_in_bytes)
    assert least < counts[1] / counts[0] < most


# -- the kernels for TPUs ---------------------------------------------------------------------------------------------


@pytest.fixture
def interpreted(monkeypatch):
    """JAX's kernels computed by XLA:CPU instead of being compiled for a TPU."""
    from jax.experimental import pallas

    compiled = pallas.pallas_call
    monkeypatch.setattr(
        pallas, "pallas_call", lambda *args, **options: compiled(*args, **options | {"interpret": True})
    )
    yield
    splash._forward.clear_cache()
    splash._backward.clear_cache()


@pytest.mark.parametrize(
    ("dtype", "shape", "causal", "scale"),
    [
        (jnp.float32, (1, 2, 1, 128, 256, 24, 40), False, 0.3),
        (jnp.float32, (1, 1, 1, 128, 384, 16, 16), True, None),  # columns that no row sees
        (jnp.float32, (1, 1, 1, 384, 128, 16, 16), True, None),
        (jnp.bfloat16, (1, 2, 1, 256, 256, 64, 64), True, -0.125),
    ],
)
def test_the_kernels_for_tpus(dtype, shape, causal, scale, interpreted, monkeypatch):
    monkeypatch.setattr(splash, "_TILE_EDGES", (128,))
    call, grad, want = case(dtype, shape, causal=causal, given_scale=scale, platform="tpu")
    assert splash.supports(call) is None
    agree(computed(splash, call, grad), want, TOLERANCES[dtype])


# -- cuDNN on GPUs ----------------------------------------------------------------------------------------------------


@pytest.fixture
def written_out(monkeypatch):
    """What JAX's module for cuDNN documents, written out: a hidden score is a large negative number."""

    def attention(query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, **options: Any) -> Any:
        assert options.pop("return_residual")
        groups = query.shape[2] // key.shape[2]
        key, value = (jnp.repeat(x, groups, 2) for x in (key, value))
        wide = jnp.float32
        scores = jnp.einsum("btnh,bsnh->bnts", query.astype(wide), key.astype(wide)) * options["scale"]
        if options["mask_type"] is cudnn._module().MaskType.CAUSAL:
            scores = jnp.where(jnp.tri(*scores.shape[2:], dtype=bool), scores, -jnp.inf)
        if mask is not None:
            bias = jnp.where(mask, jnp.zeros((), query.dtype), -(2.0**41))
        scores = scores if bias is None else scores + bias.astype(wide)
        weights = jax.nn.softmax(scores, -1)
        output = jnp.einsum("bnts,bsnh->btnh", weights, value.astype(wide))
        return output.astype(query.dtype), jax.nn.logsumexp(scores, -1)

    monkeypatch.setattr(cudnn._module(), "dot_product_attention", attention)
    yield
    cudnn._forward.clear_cache()
    cudnn._backward.clear_cache()


@pytest.mark.parametrize(
    ("shape", "bias", "causal"),
    [
        ((2, 2, 2, 64, 48, 8, 8), "none", True),
        ((2, 4, 2, 48, 64, 16, 16), "a row sees nothing", False),
        ((2, 2, 2, 32, 32, 8, 8), "a row sees nothing", True),
        ((1, 2, 2, 32, 64, 8, 8), "for each column", False),
    ],
)
def test_cudnn_forward_and_backward(shape, bias, causal, written_out):
    call, grad, want = case(jnp.bfloat16, shape, bias, causal=causal, given_scale=0.4, platform="gpu")
    if bias == "for each column" and not cudnn._skips_gradient():  # from JAX 0.11 on
        assert cudnn.supports(call) == "this JAX would compute the bias's gradient, too"
        return
    assert cudnn.supports(call) is None
    if bias == "a row sees nothing":
        del want["logsumexp"]  # of such a row it is cuDNN's large negative number
    agree(computed(cudnn, call, grad), want, TOLERANCES[jnp.bfloat16])


def test_a_program_for_a_gpu_calls_kernels_once_in_each_pass_and_has_no_score_matrix(compile_for):
    """16 x 1024 tokens with 12 causal heads of 64: a score matrix would take 384 MiB, the eight arrays take 192."""

    def step(query: Any, key: Any, value: Any, grad: Any) -> Any:
        arrays = [x.transpose(0, 2, 1, 3) for x in (query, key, value, grad)]
        call = Attention(query=arrays[0], key=arrays[1], value=arrays[2], causal=True, platform="gpu")
        form = sdpa.form_of(call)
        assert form.name == "cudnn"
        results = computed(form, call, arrays[3])
        return [results[name].transpose(0, 2, 1, 3) for name in ("output", "query", "key", "value")]

    arrays = [jax.ShapeDtypeStruct((16, 1024, 12, 64), jnp.bfloat16)] * 4
    compiled = compile_for(targets.lower(step, *arrays, target="h200"), "h200")
    assert re.findall(r' custom-call\(.*_target="([^"]+)"', compiled.hlo) == [
        "__cudnn$fmhaSoftmax",
        "__cudnn$fmhaSoftmaxBackward",
    ]
    assert compiled.peak_memory <= 200 << 20
    assert "1024,1024" not in compiled.hlo


def test_a_refused_kernel_is_replaced_with_one_warning(monkeypatch):
    """The device takes cuDNN's kernel, which this machine's compiler does not know, and trains on without it."""
    device = xla_amp.xla_device()
    monkeypatch.setattr(forms, "refused", {})
    monkeypatch.setattr(forms, "_traced", {})

    def call_of_cudnn(call: Attention) -> Any:
        shapes = ((*call.query.shape[:3], call.value.shape[3]), call.dtype), (call.shape[:3], jnp.float32)
        results = tuple(jax.ShapeDtypeStruct(*each) for each in shapes)
        return jax.ffi.ffi_call("__cudnn$fmhaSoftmax", results)(call.query, call.key, call.value)

    refused = dataclasses.replace(cudnn.FORM, platforms=("cpu",), supports=lambda call: None, min_columns=0)
    refused = dataclasses.replace(refused, forward=call_of_cudnn)
    monkeypatch.setattr(sdpa, "forms_of", lambda platform: (refused, blocked.FORM, full_matrix.FORM))
    query, key, value = (torch.randn(1, 2, 16, 8, dtype=torch.bfloat16) for _ in range(3))
    want = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    moved = [x.to(device) for x in (query, key, value)]
    with pytest.warns(KernelWarning, match="the kernel 'cudnn' was refused .*cudnn") as warned:
        got = torch.nn.functional.scaled_dot_product_attention(*moved).cpu()
    assert len(warned) == 1
    assert list(forms.refused) == ["cudnn"]
    choice = forms.chosen("scaled_dot_product_attention")[-1]
    assert choice.form == "full matrix"
    assert choice.left_out["cudnn"].startswith("refused: ")
    torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.nn.functional.scaled_dot_product_attention(*moved, scale=0.5).cpu()


# -- programs of the operation -----------------------------------------------------------------------------------------

FORWARD = "_scaled_dot_product_fused_attention_overrideable"
B, H, L, S, D = 2, 4, 6, 7, 8


def both_passes(dtype: torch.dtype) -> jax.stages.Lowered:
    """A program of a causal call of torch's operation and its gradient."""

    def step(*arrays: Any) -> Any:
        options = {"platform": "cpu"}
        forward = lowering_of(FORWARD).function(*arrays, None, 0.0, True, False, **options)
        saved = (forward[0].astype(arrays[0].dtype), forward[1], None, None, L, S, 0.0, True, None, None)
        return lowering_of(f"{FORWARD}_backward").function(saved[0], *arrays, None, [True] * 4, *saved, **options)

    shapes = ((B, H, L, D), (B, H, S, D), (B, H, S, 5))
    arrays = [to_array(sample(*shape, dtype=dtype, seed=i)) for i, shape in enumerate(shapes)]
    return jax.jit(step).lower(*arrays)


@pytest.mark.parametrize("has_units", [True, False])
def test_a_bf16_product_widens_its_operands_only_for_a_cpu_without_units(
    has_units: bool, monkeypatch: pytest.MonkeyPatch
):
    flags = frozenset({"avx512_bf16"} if has_units else ())
    monkeypatch.setattr(hardware, "processor", lambda: hardware.Processor("a CPU", 2, flags))
    monkeypatch.setattr(contraction, "_SOME_FAIL", False)
    products = [line for line in both_passes(torch.bfloat16).as_text().splitlines() if "dot_general" in line]
    assert len(products) == 7  # two forward, five backward; one of those recomputes a forward product
    low = [line.rsplit(" : ", 1)[1].count("bf16") for line in products]
    assert low.count(2) == (7 if has_units else 2)  # the two weight-like gradients contract rows of both operands
    assert low.count(0) == 7 - low.count(2)


def test_a_program_of_both_passes_computes_the_scores_once():
    compiled = both_passes(torch.float32).compile().as_text()
    assert sum(" exponential(" in line for line in compiled.splitlines()) == 1


# -- which form a call gets -------------------------------------------------------------------------------------------


def example(**changes: Any) -> Attention:
    heads = changes.pop("heads", 8)
    shapes = {
        name: (1, heads, changes.pop(length, 1024), changes.pop(f"width_of_{name}", 64))
        for name, length in (("query", "rows"), ("key", "columns"), ("value", "columns"))
    }
    dtype = changes.pop("dtype", jnp.bfloat16)
    operands = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    return Attention(**operands, **({"platform": "tpu", "causal": True} | changes))  # type: ignore[arg-type]


_MASK = jax.ShapeDtypeStruct((1024, 1024), jnp.bool_)
_MASKS = jax.ShapeDtypeStruct((1, 1, 1024, 1024), jnp.bool_)
_LONG = {"rows": 16384, "columns": 16384}


def _features(number: int) -> dict[str, int]:
    return {f"width_of_{name}": number for name in ("query", "key", "value")}


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "splash"),
        ({"causal": False}, "splash"),
        ({"dtype": jnp.float32}, "splash"),
        (_LONG, "splash"),
        ({"columns": 512}, "splash"),
        ({"columns": 384}, "full matrix"),
        ({"columns": 0}, "full matrix"),
        ({"rows": 1000}, "full matrix"),
        ({"width_of_value": 32}, "splash"),
        (_features(32), "full matrix"),  # a factor of 1 / sqrt(32) would round the query
        ({**_features(32), "given_scale": 0.5}, "splash"),
        ({**_features(128), **_LONG}, "blocked"),
        (_features(192), "full matrix"),
        (_features(256), "splash"),
        ({**_features(256), "dtype": jnp.float32}, "splash"),
        ({**_features(512), "dtype": jnp.float32}, "full matrix"),
        (_features(1024), "full matrix"),
        ({"dtype": jnp.float16}, "full matrix"),
        ({"bias": _MASK}, "full matrix"),
        ({"rng": 0, "dropout": 0.1}, "full matrix"),
        ({"partitioned": True}, "full matrix"),
        ({"partitioned": True, **_LONG}, "blocked"),
        ({"rng": 0, "dropout": 0.1, **_LONG}, "blocked"),
        ({"platform": "gpu"}, "cudnn"),
        ({"platform": "gpu", "dtype": jnp.float16, "causal": False}, "cudnn"),
        ({"platform": "gpu", "bias": _MASKS}, "cudnn"),
        ({"platform": "gpu", "rows": 1, "bias": _MASKS}, "full matrix"),  # a token at a time, with a mask
        ({"platform": "gpu", "columns": 128}, "full matrix"),
        ({"platform": "gpu", "dtype": jnp.float32}, "full matrix"),
        ({"platform": "gpu", "rng": 0, "dropout": 0.1}, "full matrix"),
        ({"platform": "gpu", "partitioned": True}, "full matrix"),
        ({"platform": "gpu", **_features(256)}, "full matrix"),
        ({"platform": "gpu", "width_of_value": 32}, "full matrix"),
        ({"platform": "cpu", "rows": 256, "columns": 256}, "full matrix"),
        ({"platform": "cpu", **_LONG}, "blocked"),
        ({"platform": "cpu", "rows": 1, "columns": 1 << 26}, "full matrix"),
    ],
)
def test_the_form_of_a_call(changes, name):
    assert sdpa.form_of(example(**changes)).name == name


def test_the_choice_says_what_each_form_objected_to():
    sdpa.form_of(example(platform="gpu", width_of_value=32, causal=False))
    choice = forms.chosen("scaled_dot_product_attention")[-1]
    assert choice.call == "1 x 8 heads, 1024 rows, 1024 columns, 64 features, bfloat16"
    assert (choice.form, choice.platform) == ("full matrix", "gpu")
    assert dict(choice.left_out) == {
        "cudnn": "the result has other features than the query",
        "blocked": "fewer than 1024 rows, or a score matrix of less than 1024 MiB",
    }
    sdpa.form_of(example(platform="gpu", causal=False))
    choice = forms.chosen("scaled_dot_product_attention")[-1]
    assert choice.form == "cudnn"


def test_the_operation_takes_the_form_that_suits_in_both_passes(monkeypatch):
    monkeypatch.setattr(blocked, "BLOCK", 8)
    query, key, value, grad = made(jnp.float64, 1, 2, 2, 20, 12, 8, 8)
    key_of_draws, options = jax.random.key(1), {"platform": "cpu", "scale": 0.3}

    def both(query: Any, key: Any, value: Any, grad: Any) -> list[Any]:
        output, logsumexp, *_, seed, _, _ = sdpa.attention(
            query, key, value, None, 0.3, False, rng=key_of_draws, **options
        )
        saved = (output, logsumexp, None, None, 20, 12, 0.3, False, seed, None)
        gradients = sdpa.attention_backward(grad, query, key, value, None, [True] * 4, *saved, **options)
        return [output, logsumexp, *gradients[:3]]

    monkeypatch.setattr(blocked, "_LARGE", {"cpu": (0, 0)})
    results = jax.jit(both)(query, key, value, grad)
    call = Attention(query=query, key=key, value=value, dropout=0.3, given_scale=0.3, rng=key_of_draws, platform="cpu")
    want = computed(blocked, call, grad)
    for x, name in zip(results, ("output", "logsumexp", "query", "key", "value"), strict=True):
        np.testing.assert_allclose(x, want[name], rtol=1e-12, err_msg=name)


def test_a_program_for_a_tpu_has_three_kernels_for_all_its_layers_and_no_score_matrix():
    def step(query: Any, key: Any, value: Any, grad: Any, layers: int) -> Any:
        for _ in range(layers):
            call = Attention(query=query, key=key, value=value, causal=True, platform="tpu")
            results = computed(sdpa.form_of(call), call, grad)
            query, key, value = (results[name] for name in ("query", "key", "value"))
        return tuple(results.values())[:5]

    def text(length: int, layers: int) -> str:
        arrays = [jax.ShapeDtypeStruct((1, 2, length, 64), jnp.bfloat16)] * 4
        traced = jax.jit(step, static_argnames="layers").trace(*arrays, layers=layers)
        return str(traced.lower(lowering_platforms=("tpu",)).as_text())

    long = text(2048, layers=2)
    assert long.count("custom_call @tpu_custom_call") == 3
    assert "2048x2048" not in long
    assert "256x256" in text(256, layers=1)


@pytest.mark.full
@pytest.mark.parametrize(
    ("dtype", "features", "scale"), [(jnp.bfloat16, 512, 0.5), (jnp.float32, 256, None), (jnp.bfloat16, 36, 0.5)]
)
def test_a_small_tpu_has_room_for_the_widest_and_the_oddest_features(dtype, features, scale, compile_for):
    def step(query: Any, key: Any, value: Any, grad: Any) -> Any:
        call = Attention(query=query, key=key, value=value, causal=True, given_scale=scale, platform="tpu")
        assert splash.supports(call) is None
        return tuple(computed(splash, call, grad).values())[:5]

    arrays = [jax.ShapeDtypeStruct((1, heads, 1024, features), dtype) for heads in (2, 1, 1, 2)]
    compiled = compile_for(targets.lower(step, *arrays, target="v5e"), "v5e")
    assert 0 < compiled.bytes_accessed < 1 << 28
    assert "1024,1024" not in compiled.hlo


@pytest.mark.parametrize("causal", [True, False])
def test_the_operation_of_torchs_cpu(causal: bool):
    """It has its arguments in another order, and its mask is not differentiated."""
    names = "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"
    forward, backward = (lowering_of(name).function for name in names)
    *operands, grad = made(jnp.float64, 2, 4, 2, 6, 7, 8, 5)
    bias = None if causal else jnp.asarray(RNG.uniform(-1, 1, (6, 7)))
    options = {"attn_mask": bias, "scale": 0.3, "platform": "cpu"}
    output, logsumexp = forward(*operands, 0.0, causal, **options)
    gradients = backward(grad, *operands, output, logsumexp, 0.0, causal, **options)
    got = {"output": output, "logsumexp": logsumexp, **dict(zip(("query", "key", "value"), gradients, strict=True))}
    want = exact([*operands, grad], bias, causal, 0.3)
    agree(got, {name: want[name] for name in got}, TOLERANCES[jnp.float64])
