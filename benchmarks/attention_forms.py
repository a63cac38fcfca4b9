"""Time and memory of attention, forward and backward, on this machine: our forms, JAX's own and torch's.

    python benchmarks/attention_forms.py [--batch 16 --heads 12 --tokens 1024 --features 64] [--rounds 20]

bfloat16, causal; medians of interleaved rounds, and XLA's count of temporary memory.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from results import interleaved, machine

from xla_amp.lazy.programs import pjrt
from xla_amp.lowering.attention import sdpa
from xla_amp.lowering.attention.attention_call import Attention, AttentionForm

Arrays = list[Any]


def ours(form: AttentionForm) -> Callable[..., Any]:
    """Forward and backward pass of one form."""

    def both(query: Any, key: Any, value: Any, grad: Any) -> Any:
        call = Attention(query=query, key=key, value=value, causal=True, platform=pjrt.platform())
        output, logsumexp = form.forward(call)
        low = output.astype(query.dtype)
        return low, form.backward(call, grad, low, logsumexp, False)[:3]

    return both


def library(implementation: str | None) -> Callable[..., Any]:
    """`jax.nn.dot_product_attention`, whose rows are tokens."""

    def both(query: Any, key: Any, value: Any, grad: Any) -> Any:
        def forward(*operands: Any) -> Any:
            turned = (x.transpose(0, 2, 1, 3) for x in operands)
            return jax.nn.dot_product_attention(*turned, is_causal=True, implementation=implementation)

        output, pullback = jax.vjp(forward, query, key, value)
        return output, pullback(grad.transpose(0, 2, 1, 3))

    return both


def timed(run: Callable[[], Any]) -> Callable[[], float]:
    """The seconds of one run."""

    def once() -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return once


def torch_run(arrays: Arrays, device: str) -> Callable[[], Any]:
    """torch's `scaled_dot_product_attention` and its backward pass."""
    query, key, value, grad = (
        torch.tensor(jax.device_get(x.astype(jnp.float32)), device=device, dtype=torch.bfloat16) for x in arrays
    )
    operands = [x.requires_grad_() for x in (query, key, value)]

    def run() -> None:
        output = torch.nn.functional.scaled_dot_product_attention(*operands, is_causal=True)
        torch.autograd.grad(output, operands, grad)
        if device == "cuda":
            torch.cuda.synchronize()

    return run


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("batch", 16), ("heads", 12), ("tokens", 1024), ("features", 64), ("rounds", 20)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    shape = options.batch, options.heads, options.tokens, options.features
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [jax.random.normal(key, shape, jnp.float32).astype(jnp.bfloat16) for key in keys]
    example = Attention(query=arrays[0], key=arrays[1], value=arrays[2], causal=True, platform=pjrt.platform())
    forms = {
        f"xla_amp, {form.name}": ours(form)
        for form in sdpa.forms_of(example.platform)
        if form.objection(example) is None
    }
    on_gpu = pjrt.platform() == "gpu"
    peers = {f"jax.nn, {name}": library(name) for name in ("xla", *(["cudnn"] if on_gpu else []))}
    runs: dict[str, Callable[[], float]] = {}
    memory: dict[str, int] = {}
    for name, function in (forms | peers).items():
        try:
            compiled = jax.jit(function).lower(*arrays).compile()
            memory[name] = compiled.memory_analysis().temp_size_in_bytes
            runs[name] = timed(lambda compiled=compiled: jax.block_until_ready(compiled(*arrays)))  # type: ignore[misc]
            runs[name]()
        except Exception as error:  # one library's refusal is a result, too
            print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}")
            runs.pop(name, None)
    device = "cuda" if on_gpu and torch.cuda.is_available() else "cpu"
    runs[f"torch SDPA, {device}"] = timed(torch_run(arrays, device))
    runs[f"torch SDPA, {device}"]()
    seconds = interleaved(runs, options.rounds)
    print(machine())
    print(f"{options.batch} x {options.heads} x {options.tokens} x {options.features}, bfloat16, causal, both passes")
    for name, median in seconds.items():
        size = f"{memory[name] / 2**20:8.1f} MiB of temporary memory" if name in memory else ""
        print(f"{name:<28} {1e3 * median:8.2f} ms {size}")


if __name__ == "__main__":
    main()
