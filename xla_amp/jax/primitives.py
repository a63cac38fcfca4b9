"""How the parts of a JAX program are treated, beside the rule that decides their dtype.

Which dtype a primitive computes in is the policy's business (``policy/tables``, by the ATen name that
``policy/tables/classes.toml`` gives the primitive).  What stands here is what the machinery needs to know to carry that
out: which primitives are contractions, which contain programs of their own, and which cannot take another dtype than
the one that they were traced with.  A primitive without a row follows its operands: they are brought to their widest
dtype and it is bound as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal[
    "contraction",
    "moves",
    "separate",
    "converts",
    "typed",
    "kernel",
    "call",
    "checkpoint",
    "scan",
    "while",
    "cond",
    "custom_jvp",
    "custom_vjp",
    "shard_map",
]
"""
``contraction``  takes the form of `xla_amp.jax.contraction_primitives` where the policy says ``low``
``moves``        one array in, the same values out in another place: a cast may be moved across it
``separate``     its operands have nothing to do with each other: each keeps its dtype
``converts``     changes the dtype itself, because the user wrote so: left alone
``typed``        gets the dtypes that it was traced with: what it contains, or its kernel, exists for those only
``kernel``       typed, and worth tracing the function again at the low dtype: the trace driver is chosen for it
the others       contain programs, each with its own way in `xla_amp.jax.higher_order.handlers`
"""


class Treatment(NamedTuple):
    """A row of the table."""

    kind: Kind
    why: str


_ROWS: Final[tuple[tuple[Kind, str, tuple[str, ...]], ...]] = (
    (
        "contraction",
        "low operands, float32 accumulation, gradients of weights straight from the accumulator",
        ("conv_general_dilated", "dot_general", "ragged_dot_general"),
    ),
    (
        "moves",
        "values only move",
        (
            "broadcast_in_dim",
            "copy",
            "copy_p",
            "dynamic_slice",
            "gather",
            "pbroadcast",
            "pcast",
            "pvary",
            "reshape",
            "reshard",
            "rev",
            "sharding_constraint",
            "slice",
            "squeeze",
            "transpose",
        ),
    ),
    (
        "separate",
        "operands travel together but are not combined",
        (
            "all_gather",
            "all_gather_invariant",
            "all_to_all",
            "optimization_barrier",
            "pmax",
            "pmin",
            "ppermute",
            "psum",
            "psum_invariant",
            "reduce_scatter",
            "sort",
        ),
    ),
    ("converts", "the user asked for this dtype or precision", ("convert_element_type", "reduce_precision")),
    (
        "typed",
        "what it contains was traced for these dtypes",
        (
            "addupdate",
            "approx_top_k",
            "bitcast_convert_type",
            "call_exported",
            "composite",
            "custom_lin",
            "custom_linear_solve",
            "custom_transpose_call",
            "debug_callback",
            "ffi_call",
            "get",
            "io_callback",
            "linear_call",
            "new_ref",
            "pure_callback",
            "reduce",
            "reduce_window",
            "ref_get",
            "ref_set",
            "ref_swap",
            "run_state",
            "scatter",
            "scatter-add",
            "scatter-max",
            "scatter-min",
            "scatter-mul",
            "scatter-sub",
            "scatter_add",
            "select_and_gather_add",
            "select_and_scatter",
            "select_and_scatter_add",
            "swap",
        ),
    ),
    (
        "kernel",
        "the kernel was written for these dtypes; only its caller can ask for another one",
        ("custom_partitioning", "pallas_call", "triton_kernel_call"),
    ),
    ("call", "a function with a name", ("closed_call", "core_call", "jit", "pjit")),
    ("checkpoint", "a function that the backward pass runs again", ("checkpoint", "remat", "remat2")),
    ("scan", "a loop over a leading axis", ("scan",)),
    ("while", "a loop until a condition", ("while",)),
    ("cond", "one of several functions", ("cond",)),
    ("custom_jvp", "a function with its own derivative", ("custom_jvp_call",)),
    ("custom_vjp", "a function with its own derivative", ("custom_vjp_call",)),
    ("shard_map", "a function of one device's part", ("shard_map",)),
)


def _table() -> Iterator[tuple[str, Treatment]]:
    for kind, why, primitives in _ROWS:
        for primitive in primitives:
            yield primitive, Treatment(kind, why)


TREATMENTS: Final[Mapping[str, Treatment]] = MappingProxyType(dict(_table()))
"""Primitive name -> how it is treated."""

FOLLOWS_BACK: Final = frozenset({"add_any", "convert_element_type"})
"""Primitives through which a weight's gradient leaves the backward pass as it was, besides ``moves``."""

DTYPE_PARAMETER: Final[Mapping[str, str]] = MappingProxyType({"mul": "out_dtype"})
"""Primitives that name the dtype of their result, and how."""
