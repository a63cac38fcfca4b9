"""Damaged programs: random and deliberate mutations of valid programs in every format."""

from __future__ import annotations

import random
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import export

from xla_amp.stablehlo import ir
from xla_amp.stablehlo.program import Format, Program, dump

Mutation = Callable[[random.Random, bytes], bytes]


def program(weights, x, key):
    """Loops, branches, sorts, a scatter, random bits, a gradient: each kind of region and many attributes."""

    def loss(weights):
        h, sums = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), h.sum()), x, weights)
        h = jax.lax.cond(sums.sum() > 0, lambda h: jnp.sort(h), lambda h: jax.nn.softmax(h), h)
        return h.at[jnp.array([0, 2])].add(jax.random.normal(key, (2, 8))).sum()

    return jax.value_and_grad(loss)(weights)


def originals() -> dict[Format, bytes]:
    """One valid program in each format."""
    arguments = [jax.ShapeDtypeStruct((3, 8, 8), jnp.float32), jax.ShapeDtypeStruct((4, 8), jnp.float32)]
    arguments.append(jax.ShapeDtypeStruct((2,), jnp.uint32))
    exported = export.export(jax.jit(program))(*arguments)
    module = ir.parse(jax.jit(program).lower(*arguments).as_text())
    found: dict[Format, bytes] = {"export": bytes(exported.serialize())}
    for kind in ("text", "bytecode", "artifact"):
        found[kind] = dump(Program(module=module, format=kind), kind)
    return found


def _truncated(dice: random.Random, data: bytes) -> bytes:
    return data[: dice.randrange(len(data))]


def _flipped(dice: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(dice.randrange(1, 8)):
        changed[dice.randrange(len(changed))] = dice.randrange(256)
    return bytes(changed)


def _deleted(dice: random.Random, data: bytes) -> bytes:
    start = dice.randrange(len(data))
    return data[:start] + data[start + dice.randrange(1, 60) :]


def _inserted(dice: random.Random, data: bytes) -> bytes:
    start = dice.randrange(len(data))
    return data[:start] + dice.randbytes(dice.randrange(1, 20)) + data[start:]


def _copied(dice: random.Random, data: bytes) -> bytes:
    start, end = dice.randrange(len(data)), dice.randrange(len(data))
    length = dice.randrange(1, 80)
    return data[:start] + data[end : end + length] + data[start + length :]


def _other_magic(dice: random.Random, data: bytes) -> bytes:
    return dice.choice([b"ML\xefS", b"\x7fELF", b"PK\x03\x04", b"ML\xefR", b"\0\0\0\0"]) + data[4:]


ANY: tuple[Mutation, ...] = (_truncated, _flipped, _deleted, _inserted, _copied, _other_magic)
"""Damage for any format."""


def _replaced(old: str, *new: str) -> Mutation:
    def replaced(dice: random.Random, data: bytes) -> bytes:
        parts = data.split(old.encode())
        if len(parts) < 2:
            return _truncated(dice, data)
        where = dice.randrange(1, len(parts))
        return old.encode().join(parts[:where]) + dice.choice(new).encode() + old.encode().join(parts[where:])

    return replaced


def _swapped_lines(dice: random.Random, data: bytes) -> bytes:
    lines = data.split(b"\n")
    a, b = dice.randrange(len(lines)), dice.randrange(len(lines))
    lines[a], lines[b] = lines[b], lines[a]
    return b"\n".join(lines)


_HUGE = "tensor<9223372036854775807x9223372036854775807xf32>"

TEXT: tuple[Mutation, ...] = (
    _replaced("xf32>", "xi32>", "xbf16>", "xcomplex<f64>>", "xf31>", "x!quant.any>", "xtensor<f32>>"),
    _replaced("tensor<", "vector<", "memref<", "tuple<", "tensor<*x", "tensor<?x", "tensor<-1x"),
    _replaced("stablehlo.", "stablehol.", "tf.", "linalg.", "", "vhlo."),
    _replaced("%0", "%1", "%99999", "%arg0", "%%"),
    _replaced("@main", "@other", "@", '@"\\00"'),
    _replaced("dense<", "dense_resource<", "dense<[", 'dense<"0x', "sparse<", "array<i64: "),
    _replaced("func.func public", "func.func private", "module", "func.func public public"),
    _replaced("stablehlo.while", "stablehlo.case", "stablehlo.if", "stablehlo.return"),
    _replaced("call @", "call @main_", "call @main // @", "func.call @"),
    _replaced("stablehlo.constant dense<0.000000e+00> : tensor<f32>", f"stablehlo.constant dense<1.0> : {_HUGE}"),
    _replaced("stablehlo.tanh", "stablehlo.cosine", "stablehlo.while", "stablehlo.dot_general", "chlo.erf_inv"),
    _swapped_lines,
)
"""Damage for text only: wrong types, unknown dialects, uses before definitions, regions and functions that contain
themselves, constants larger than memory."""


def mutated(seed: int, sources: dict[Format, bytes]) -> tuple[str, bytes]:
    """One damaged program and its description; deterministic for a seed."""
    dice = random.Random(seed)
    kind = dice.choice(tuple(sources))
    mutation = dice.choice((*ANY, *TEXT) if kind == "text" else ANY)
    return f"{kind}, {getattr(mutation, '__name__', '')}", mutation(dice, sources[kind])
