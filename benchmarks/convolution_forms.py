"""GFLOP/s of ResNet-50's convolutions on one core of this CPU, in bfloat16: our forms, oneDNN's, and forms tried.

    python benchmarks/convolution_forms.py [--batch 8 --side 96] [--rounds 9] [--only 3x3]

Each map (forward, data gradient, weight gradient) is a program by itself, with torch's layouts: what a form
pays to change the layout is in its figure, and in a whole step neighbours may share it.  CPU time of the process, least
of interleaved rounds, so that other programs on the machine count little.  ``dot`` is the bfloat16 product of the same
size alone: the most that a form that ends in one can have.  Writes benchmarks/results/convolution_forms.{json,md}.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from models import ResNet50
from results import write_json, write_markdown
from torch import nn

from xla_amp.lowering.linalg.contraction import contract
from xla_amp.lowering.nn import convolution
from xla_amp.lowering.nn.convolution_taps import Geometry

MAPS = ("forward", "data gradient", "weight gradient")
FORMS = ("oneDNN", "ours", "channels_first", "channels_last", "xla, in float32", "one dot", "Winograd", "dot")
Run = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Layer:
    """One kind of convolution of the model."""

    x: tuple[int, ...]
    weight: tuple[int, ...]
    y: tuple[int, ...]
    stride: int
    padding: int
    count: int = 1
    """How many the model has of it."""

    @property
    def flops(self) -> int:
        """Of one map: a product and a sum for each."""
        return 2 * math.prod(self.y) * math.prod(self.weight[1:])

    @property
    def geometry(self) -> Geometry:
        return Geometry.from_torch([self.stride], [self.padding], [1], 1, 2)

    def __str__(self) -> str:
        filters, channels, *kernel = self.weight
        return f"{channels} x {self.x[-1]}, {filters} of {'x'.join(map(str, kernel))} / {self.stride}"


def layers(batch: int, side: int) -> list[Layer]:
    """The distinct convolutions of ResNet-50, with how often each occurs."""
    found: dict[Layer, int] = {}

    def note(module: nn.Conv2d, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        sizes = (tuple(inputs[0].shape), tuple(module.weight.shape), tuple(output.shape))
        layer = Layer(*sizes, module.stride[0], int(module.padding[0]))
        found[layer] = found.get(layer, 0) + 1

    with torch.device("meta"):
        model = ResNet50().eval()
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                module.register_forward_hook(note)
        model.features(torch.empty(batch, 3, side, side))
    return [dataclasses.replace(layer, count=count) for layer, count in found.items()]


def _patches(x: jax.Array, layer: Layer) -> jax.Array:
    """What each element of the result reads: ``(N * H * W, kernel * C)``.

    As integers: XLA:CPU concatenates bfloat16 in float32.
    """
    low = x.dtype == jnp.bfloat16
    x = lax.bitcast_convert_type(x, jnp.uint16) if low else x
    edge, step = layer.padding, layer.stride
    padded = jnp.pad(jnp.moveaxis(x, 1, -1), ((0, 0), (edge, edge), (edge, edge), (0, 0)))
    rows, columns = layer.y[2:]
    windows = [
        padded[:, i : i + (rows - 1) * step + 1 : step, j : j + (columns - 1) * step + 1 : step]
        for i, j in np.ndindex(*layer.weight[2:])
    ]
    patches = jnp.concatenate(windows, -1).reshape(-1, len(windows) * x.shape[1])
    return lax.bitcast_convert_type(patches, jnp.bfloat16) if low else patches


def _one_dot(layer: Layer) -> tuple[Callable[..., jax.Array], ...]:
    """im2col: one product for all elements of the kernel."""
    filters, channels, *kernel = layer.weight
    batch, _, *spatial = layer.y

    def rows(weight: jax.Array) -> jax.Array:
        return jnp.moveaxis(weight, 1, -1).reshape(filters, -1)

    def forward(x: jax.Array, weight: jax.Array) -> jax.Array:
        y = contract(_patches(x, layer), rows(weight), ((1,), (1,)), platform="cpu")
        return jnp.moveaxis(y.reshape(batch, *spatial, filters), -1, 1)

    def data(grad: jax.Array, weight: jax.Array) -> jax.Array:
        lines = jnp.moveaxis(grad, 1, -1).reshape(-1, filters)
        product = contract(lines, rows(weight), ((1,), (0,)), platform="cpu")
        x = jax.ShapeDtypeStruct(layer.x, jnp.float32)
        scattered: jax.Array = jax.linear_transpose(lambda x: _patches(x, layer), x)(product)[0]
        return scattered

    def weight(grad: jax.Array, x: jax.Array) -> jax.Array:
        lines = jnp.moveaxis(grad, 1, -1).reshape(-1, filters)
        product = contract(lines, _patches(x, layer), ((0,), (0,)), platform="cpu")
        return jnp.moveaxis(product.reshape(filters, *kernel, channels), -1, 1)

    return forward, data, weight


_INPUT = np.array([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]], np.float32)
_KERNEL = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]], np.float32)
_OUTPUT = np.array([[1, 1, 1, 0], [0, 1, -1, -1]], np.float32)


def _sums(matrix: np.ndarray, parts: Sequence[Sequence[jax.Array]]) -> list[list[jax.Array]]:
    """``matrix @ parts @ matrix.T`` of arrays; products with 0 are left out."""

    def line(row: np.ndarray, arrays: Sequence[jax.Array]) -> jax.Array:
        return sum(float(factor) * array for factor, array in zip(row, arrays, strict=True) if factor)  # type: ignore[return-value]

    half = [[line(row, column) for column in zip(*parts, strict=True)] for row in matrix]
    return [[line(row, arrays) for row in matrix] for arrays in half]


def _winograd(layer: Layer) -> Callable[..., jax.Array]:
    """The forward map by Winograd's F(2 x 2, 3 x 3): 16 products for 4 elements instead of 36 (Lavin and Gray 2015)."""
    filters, channels, *_ = layer.weight
    batch, _, *spatial = layer.y
    tiles = [(extent + 1) // 2 for extent in spatial]

    def forward(x: jax.Array, weight: jax.Array) -> jax.Array:
        last = jnp.moveaxis(x.astype(jnp.float32), 1, -1)
        margin = ((1, 2 * n + 1 - extent) for n, extent in zip(tiles, spatial, strict=True))
        padded = jnp.pad(last, ((0, 0), *margin, (0, 0)))
        corner = [2 * n - 1 for n in tiles]
        parts = [[padded[:, i : i + corner[0] : 2, j : j + corner[1] : 2] for j in range(4)] for i in range(4)]
        low = [part.astype(jnp.bfloat16) for row in _sums(_INPUT, parts) for part in row]
        taps = [[weight[:, :, i, j].astype(jnp.float32) for j in range(3)] for i in range(3)]
        kernels = [tap.astype(jnp.bfloat16) for row in _sums(_KERNEL, taps) for tap in row]
        products = [
            contract(part.reshape(-1, channels), kernel, ((1,), (1,)), platform="cpu")
            for part, kernel in zip(low, kernels, strict=True)
        ]
        results = _sums(_OUTPUT, [products[4 * i : 4 * i + 4] for i in range(4)])
        shaped = [[part.reshape(batch, *tiles, filters) for part in row] for row in results]
        wide = jnp.stack([jnp.stack(row, 3) for row in shaped], 2)
        whole = wide.reshape(batch, 2 * tiles[0], 2 * tiles[1], filters)
        return jnp.moveaxis(whole[:, : spatial[0], : spatial[1]], -1, 1)

    return forward


def _form(form: convolution.ConvolutionForm, layer: Layer) -> tuple[Callable[..., jax.Array], ...]:
    geometry = layer.geometry
    return (
        lambda x, weight: form.forward(x, weight, geometry),
        lambda grad, weight: form.data_gradient(grad, weight, layer.x[2:], geometry),
        lambda grad, x: form.weight_gradient(grad, x, layer.weight, geometry),
    )


def _dot(layer: Layer) -> list[Callable[..., jax.Array]]:
    """The products alone, operands as a dot likes them."""
    return [lambda left, right: contract(left, right, ((1,), (1,)), platform="cpu")] * 3


def _dot_operands(layer: Layer) -> Iterator[tuple[jax.Array, jax.Array]]:
    lines, width, filters = math.prod(layer.y) // layer.y[1], math.prod(layer.weight[1:]), layer.weight[0]
    for m, n, k in ((lines, filters, width), (lines, width, filters), (filters, width, lines)):
        yield jnp.ones((m, k), jnp.bfloat16), jnp.ones((n, k), jnp.bfloat16)


def contestants(layer: Layer) -> dict[tuple[str, str], Run]:
    """(form, map) -> one run of it."""
    rng = np.random.default_rng(0)
    host = [rng.standard_normal(shape, np.float32) for shape in (layer.x, layer.weight, layer.y)]
    x, weight, grad = (jnp.asarray(array, jnp.bfloat16) for array in host)
    operands = ((x, weight), (grad, weight), (grad, x))
    rows = math.prod(layer.y) // layer.y[1]
    chosen = convolution.form_of(x.dtype, layer.weight, layer.geometry, rows, "cpu")
    named = {form.name: form for form in convolution.FORMS}
    functions: dict[str, Sequence[Callable[..., jax.Array]]] = {"ours": _form(chosen, layer)}
    for name in ("channels_first", "channels_last", "xla, in float32"):
        if name != chosen.name:
            functions[name] = _form(named[name], layer)
    functions["one dot"] = _one_dot(layer)
    if layer.weight[2:] == (3, 3) and layer.stride == 1:
        functions["Winograd"] = [_winograd(layer)]
    functions["dot"] = _dot(layer)
    runs: dict[tuple[str, str], Run] = {}
    for name, maps in functions.items():
        # Winograd has the first map only.
        for label, function, pair in zip(MAPS, maps, _dot_operands(layer) if name == "dot" else operands, strict=False):
            low = lambda *pair, function=function: function(*pair).astype(jnp.bfloat16)  # noqa: E731
            compiled = jax.jit(low).lower(*pair).compile()
            runs[name, label] = lambda compiled=compiled, pair=pair: jax.block_until_ready(compiled(*pair))  # type: ignore[misc]
    tx, tw, tg = (torch.from_numpy(array).bfloat16() for array in host)
    stride, padding = [layer.stride] * 2, [layer.padding] * 2
    runs["oneDNN", "forward"] = lambda: torch.nn.functional.conv2d(tx, tw, None, stride, padding)
    for label, mask in (("data gradient", [True, False, False]), ("weight gradient", [False, True, False])):
        runs["oneDNN", label] = lambda mask=mask: torch.ops.aten.convolution_backward(  # type: ignore[misc]
            tg, tx, tw, None, stride, padding, [1, 1], False, [0, 0], 1, mask
        )
    return runs


def measure(layer: Layer, rounds: int) -> dict[str, dict[str, float]]:
    """Form -> map -> seconds of CPU time, the least of the rounds."""
    runs = contestants(layer)
    best: dict[str, dict[str, float]] = {}
    for _ in range(rounds + 1):
        for (name, label), run in runs.items():
            start = time.process_time()
            run()
            seconds = time.process_time() - start
            row = best.setdefault(name, {})
            row[label] = min(row.get(label, math.inf), seconds)
    return best


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--side", type=int, default=96, help="pixels of an image")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", choices=("1x1", "3x3", "7x7"), help="kernels of this size alone")
    options = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    found = [layer for layer in layers(options.batch, options.side) if options.only in (None, str(layer).split()[-3])]
    rows: list[tuple[str, ...]] = []
    records: dict[str, Any] = {}
    total: dict[str, float] = {}
    for layer in found:
        best = records[str(layer)] = measure(layer, options.rounds)
        cells = []
        for name in FORMS:
            times = best.get(name)
            if times:
                cells.append(" / ".join(f"{layer.flops / seconds / 1e9:.0f}" for seconds in times.values()))
            else:
                cells.append("-")
            for label in MAPS:  # where it is not another form, ours
                total[name] = total.get(name, 0.0) + layer.count * (best["ours"] | (times or {}))[label]
        rows.append((str(layer), str(layer.count), *cells))
        print(" | ".join(rows[-1]), flush=True)
    rows.append(("all, ms", "", *(f"{1e3 * total[name]:.0f}" for name in FORMS)))
    write_json("convolution_forms", {"batch": options.batch, "side": options.side, "layers": records, "total": total})
    write_markdown("convolution_forms", ["input, filters / stride", "times", *FORMS], rows, __doc__.splitlines()[0])


if __name__ == "__main__":
    main()
