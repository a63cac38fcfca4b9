"""The same small step in 8-bit floats by this package and by others: error, memory, and what XLA compiles it to.

    pip install qwix torchao
    python benchmarks/float8_peers.py [--target h100] [--rows 512] [--width 256]

The step is the gradient of the mean square of a network of three layers with regard to its weights: three products,
two gradients of the data and three of weights.  Rows of the data differ in scale by up to 64.  Errors are those of the
worst gradient against float64, on this machine's CPU.  Memory and the number of 8-bit products are of the step that XLA
compiles for a GPU that is not here; nothing is run there.  A package that is not installed has an empty row.  Results
are saved to benchmarks/results/float8_peers.json and float8_peers.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from results import write_json, write_markdown

import xla_amp.jax
from xla_amp import stablehlo
from xla_amp.errors import DeviceError
from xla_amp.stablehlo.tools import targets

CALLS = tuple(f'custom_call_target="{name}"' for name in ("__cublas$lt$matmul$f8", "__cudnn$blockScaledDot"))
BLOCKS = "b200"
"""A GPU that scales blocks, for the rows of ``mxfp8``."""
WITHOUT_TRITON = {"xla_gpu_enable_triton_gemm": "False"}
STEPS = 20
"""After so many steps on the same batch the history of delayed scaling knows the magnitudes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One way to compute the step."""

    name: str
    scales: str = ""
    error: float | None = None
    """Norm of the error of the worst gradient, relative to its norm."""
    calls: int | None = None
    """8-bit products with XLA's default options."""
    calls_without_triton: int | None = None
    temporary: int | None = None
    """Bytes beside arguments and results, by XLA."""
    moved: int | None = None
    """Bytes read and written, by XLA's cost analysis."""
    note: str = ""

    @property
    def cells(self) -> list[str]:
        """For the table."""
        calls = "" if self.calls is None else f"{self.calls} ({self.calls_without_triton})"
        sizes = ["" if each is None else f"{each / 2**20:.2f}" for each in (self.temporary, self.moved)]
        return [self.name, self.scales, "" if self.error is None else f"{self.error:.2e}", calls, *sizes, self.note]


HEADINGS = (
    *("step by", "scales", "error of the worst gradient", "8-bit products (without Triton)"),
    *("temporary MiB", "MiB moved", "note"),
)

Gradients = list[np.ndarray[Any, Any]]


class Problem:
    """The weights and data, and the step in float64."""

    def __init__(self, rows: int, width: int) -> None:
        rng = np.random.default_rng(0)
        sizes = [width, 4 * width, width, width]
        self.weights = [
            rng.standard_normal(pair).astype(np.float32) / np.sqrt(pair[0], dtype=np.float32)
            for pair in itertools.pairwise(sizes)
        ]
        scales = np.exp2(rng.uniform(-6, 0, (rows, 1)))
        self.x = (rng.standard_normal((rows, width)) * scales).astype(np.float32)
        with jax.enable_x64(True):
            wide = [jnp.asarray(each, jnp.float64) for each in self.weights]
            found = jax.grad(loss)(wide, jnp.asarray(self.x, jnp.float64))
            self.exact: Gradients = [np.asarray(each) for each in found]

    def error(self, found: Gradients) -> float:
        """Of the worst gradient."""
        pairs = zip(found, self.exact, strict=True)
        return max(float(np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b)) for a, b in pairs)


def loss(weights: Any, x: Any) -> Any:
    for weight in weights[:-1]:
        x = jnp.tanh(x @ weight)
    return jnp.mean((x @ weights[-1]).astype(jnp.promote_types(x.dtype, jnp.float32)) ** 2)


class Network(nn.Module):
    """The same network in Flax, in bfloat16."""

    widths: tuple[int, ...]
    product: Any = None

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for index, width in enumerate(self.widths):
            dense = nn.Dense(width, use_bias=False, dtype=jnp.bfloat16, dot_general_cls=self.product)
            x = dense(x) if index == len(self.widths) - 1 else jnp.tanh(dense(x))
        return jnp.mean(x.astype(jnp.float32) ** 2)


def compiled(compilers: targets.Compilers, step: Callable[..., Any], arguments: Any, target: str) -> dict[str, int]:
    """What XLA says of a step that is compiled for `target`."""
    return compiled_module(compilers, targets.lower(step, *arguments, target=target), target)


def compiled_module(compilers: targets.Compilers, module: Any, target: str) -> dict[str, int]:
    """What XLA says of a module."""
    default = compilers.compile(module, target)
    without = compilers.compile(module, target, WITHOUT_TRITON)
    return {
        "calls": sum(map(default.hlo.count, CALLS)),
        "calls_without_triton": sum(map(without.hlo.count, CALLS)),
        "temporary": default.temporary_memory,
        "moved": default.bytes_accessed or 0,
    }


def ours(problem: Problem, compilers: targets.Compilers, target: str) -> Iterator[Row]:
    """This package."""
    for cast, scales, machine in (
        ("low", "", target),
        ("fp8", "of the tensor, current", target),
        ("fp8_rowwise", "of rows, current", target),
        ("mxfp8", "of 32 elements, current", BLOCKS),
    ):
        step = jax.jit(jax.grad(xla_amp.jax.autocast(loss, policy="fp8", rules={"matmul": cast})))
        arguments = (problem.weights, problem.x)
        found = [np.asarray(each) for each in step(*arguments)]
        note = "gradients of weights in bfloat16" if scales else ""
        note += f"; compiled for a {machine}" if machine != target else ""
        about = compiled(compilers, step, arguments, machine)
        name = f"xla_amp, {'bfloat16' if cast == 'low' else cast}"
        yield Row(name=name, scales=scales, error=problem.error(found), note=note, **about)
    program = jax.export.export(jax.jit(jax.grad(loss)))(*arguments)
    converted = stablehlo.autocast(program, policy="fp8", rules={"matmul": "fp8"})
    outputs = stablehlo.compare(program, converted, [*problem.weights, problem.x], operations=False).outputs
    error = max(each.b.relative for each in outputs)  # against the same float64
    about = compiled_module(compilers, converted.module, target)
    note = "the option without Triton is in the module; gradients of weights in bfloat16"
    yield Row(name="xla-amp convert --policy fp8", scales="of the tensor, current", error=error, note=note, **about)


def flax_parameters(problem: Problem) -> dict[str, Any]:
    return {f"Dense_{index}": {"kernel": weight} for index, weight in enumerate(problem.weights)}


def widths(problem: Problem) -> tuple[int, ...]:
    return tuple(weight.shape[1] for weight in problem.weights)


def qwix(problem: Problem, compilers: targets.Compilers, target: str) -> Iterator[Row]:
    """Google's qwix: quantized training."""
    if importlib.util.find_spec("qwix") is None:
        yield Row(name="qwix", note="not installed: pip install qwix")
        return
    import qwix as package

    name = f"qwix {importlib.metadata.version('qwix')}"
    for scales, whole in (("of channels, current", False), ("of the tensor, current", True)):
        rule = package.QtRule(
            module_path=".*",
            weight_qtype=jnp.float8_e4m3fn,
            act_qtype=jnp.float8_e4m3fn,
            bwd_qtype=jnp.float8_e5m2,
            disable_channelwise_axes=whole,
        )
        model = package.quantize_model(Network(widths(problem)), package.QtProvider([rule]))
        step = jax.jit(jax.grad(lambda parameters, x, model=model: model.apply({"params": parameters}, x)))
        arguments = (flax_parameters(problem), problem.x)
        found = [np.asarray(each["kernel"]) for each in step(*arguments).values()]
        about = compiled(compilers, step, arguments, target)
        yield Row(name=name, scales=scales, error=problem.error(found), note="all products in 8 bits", **about)


def flax(problem: Problem, compilers: targets.Compilers, target: str) -> Iterator[Row]:
    """Flax's operators, which keep a history of magnitudes."""
    from flax.linen import fp8_ops

    model = Network(widths(problem), fp8_ops.Fp8DirectDotGeneralOp)
    state = model.init(jax.random.key(0), problem.x)
    state = {**state, "params": flax_parameters(problem)}
    step = jax.jit(jax.grad(model.apply))
    kept = "_overwrite_with_gradient"
    name = f"Flax {importlib.metadata.version('flax')}, Fp8DirectDotGeneralOp"
    about = compiled(compilers, step, (state, problem.x), target)
    for number in range(STEPS):
        found = step(state, problem.x)
        state = {**state, kept: found[kept]}  # the new history, as Flax's train state takes it
        if number in (0, STEPS - 1):
            gradients = [np.asarray(each["kernel"]) for each in found["params"].values()]
            note = f"step {number + 1} on the same batch; all products in 8 bits"
            yield Row(name=name, scales="of the tensor, delayed", error=problem.error(gradients), note=note, **about)


def torchao(problem: Problem) -> Iterator[Row]:
    """torchao, by its emulation on the CPU; no program of XLA."""
    if importlib.util.find_spec("torchao") is None:
        yield Row(name="torchao", note="not installed: pip install torchao")
        return
    import torch
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    layers = [torch.nn.Linear(*weight.shape, bias=False) for weight in problem.weights]
    for layer, weight in zip(layers, problem.weights, strict=True):
        layer.weight.data = torch.from_numpy(weight.T.copy())
    inner = [part for layer in layers for part in (layer, torch.nn.Tanh())][:-1]
    for recipe, scales in (("tensorwise", "of the tensor, current"), ("rowwise", "of rows, current")):
        config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
        model = convert_to_float8_training(torch.nn.Sequential(*inner).bfloat16(), config=config)
        model.zero_grad()
        model(torch.from_numpy(problem.x).bfloat16()).float().square().mean().backward()
        found = [layer.weight.grad.float().numpy().T for layer in model if hasattr(layer, "weight")]
        yield Row(
            name=f"torchao {importlib.metadata.version('torchao')}, {recipe}",
            scales=scales,
            error=problem.error(found),
            note="emulated on the CPU; all products in 8 bits; torch.compile on a GPU, not XLA",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="h100")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--width", type=int, default=256)
    options = parser.parse_args()
    if not targets.available(options.target):
        raise DeviceError(f"the compiler for {options.target} is not installed: pip install 'xla-amp[targets]'")
    problem = Problem(options.rows, options.width)
    found: list[Row] = []
    with targets.Compilers() as compilers:
        for peer in (ours, qwix, flax):
            found += peer(problem, compilers, options.target)
    found += torchao(problem)
    content = {"target": options.target, "rows": options.rows, "width": options.width}
    write_json("float8_peers", {**content, "peers": [dataclasses.asdict(row) for row in found]})
    write_markdown("float8_peers", HEADINGS, [row.cells for row in found], __doc__.splitlines()[0])


if __name__ == "__main__":
    main()
