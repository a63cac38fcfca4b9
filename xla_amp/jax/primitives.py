"""Table of JAX primitives by kind: how autocast handles each, apart from its dtype.

The policy decides which dtype a primitive computes in (``policy/tables``, by the ATen name that
``policy/tables/classes.toml`` gives the primitive).  This table says what the interpreter must know to apply the
decision: which primitives are contractions, which contain jaxprs, and which accept only the dtypes that they were
traced with.  The default, for a primitive without a row: promote the operands to their widest dtype and bind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal[
    "contraction",
    "data_movement",
    "independent",
    "clear",
    "conversion",
    "fixed_dtype",
    "call",
    "checkpoint",
    "scan",
    "while",
    "cond",
    "custom_jvp",
    "custom_vjp",
    "composite",
    "custom_vmap",
    "linear_call",
    "shard_map",
]
"""
``contraction``    bound as a primitive of `xla_amp.jax.contraction_primitives` if the policy says ``low``
``data_movement``  returns elements of its first operand unchanged: a cast commutes with it
``independent``    does not combine its operands: each keeps its dtype
``clear``          compares or selects: no tensor is rounded for it, and numbers adopt the dtype of the others
``conversion``     an explicit change of dtype or precision by the user: bound as it is
``fixed_dtype``    gets the dtypes that it was traced with, since its sub-jaxpr or kernel exists for those only
the others         contain jaxprs; each has a rule in `xla_amp.jax.higher_order.handlers`
"""


class PrimitiveInfo(NamedTuple):
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
        "data_movement",
        "elements are moved, not computed",
        (
            "all_gather",
            "all_gather_invariant",
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
        "independent",
        "operands are not combined with each other",
        (
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
    (
        "clear",
        "it compares or selects its operands and rounds none of them",
        ("clamp", "eq", "ge", "gt", "le", "lt", "max", "min", "ne", "select_n"),
    ),
    ("conversion", "the user asked for this dtype or precision", ("convert_element_type", "reduce_precision")),
    (
        "fixed_dtype",
        "its sub-jaxpr or kernel was traced for these dtypes",
        (
            "addupdate",
            "approx_top_k",
            "bitcast_convert_type",
            "call_exported",
            "custom_lin",
            "custom_transpose_call",
            "debug_callback",
            "ffi_call",
            "get",
            "io_callback",
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
        "fixed_dtype",
        "the kernel was built for these dtypes; only its caller can request others",
        ("custom_partitioning", "pallas_call", "triton_kernel_call"),
    ),
    (
        "fixed_dtype",
        "a solver compares residuals, which low products would not let converge",
        ("custom_linear_solve",),
    ),
    ("call", "a named function", ("closed_call", "core_call", "eval_jaxpr", "jit", "pjit")),
    ("checkpoint", "a function that the backward pass recomputes", ("checkpoint", "remat", "remat2")),
    ("scan", "a loop over a leading axis", ("scan",)),
    ("while", "a loop until a condition", ("while",)),
    ("cond", "one of several functions", ("cond",)),
    ("custom_jvp", "a function with its own derivative", ("custom_jvp_call",)),
    ("custom_vjp", "a function with its own derivative", ("custom_vjp_call",)),
    ("composite", "a named function that the backend may replace", ("composite",)),
    ("custom_vmap", "a function with its own batching rule", ("custom_vmap_call",)),
    ("linear_call", "a function with its own transpose", ("linear_call",)),
    ("shard_map", "a function of one device's shard", ("shard_map",)),
)


def _table() -> Iterator[tuple[str, PrimitiveInfo]]:
    for kind, why, primitives in _ROWS:
        for primitive in primitives:
            yield primitive, PrimitiveInfo(kind, why)


PRIMITIVES: Final[Mapping[str, PrimitiveInfo]] = MappingProxyType(dict(_table()))
"""Primitive name -> row."""

GRADIENT_PASSTHROUGH: Final = frozenset(
    {"add_any", "convert_element_type", "psum", "psum_invariant", "reduce_scatter", "unreduced_psum"}
)
"""Primitives that pass a weight's gradient on or add it up, besides ``data_movement``."""

CAST_BEFORE: Final = frozenset({"all_gather", "all_gather_invariant", "reshard", "sharding_constraint"})
"""Primitives that move elements between devices: what a contraction reads of a weight is rounded before, not after, so
half as many bytes travel."""

ADDED_BETWEEN_DEVICES: Final = frozenset(
    {
        *("all_gather", "all_gather_invariant", "pbroadcast", "pcast", "pvary"),
        *("pmax", "pmin", "psum", "psum_invariant", "reduce_scatter", "unreduced_psum"),
    }
)
"""Primitives that reduce over devices, and those whose derivative does."""

DTYPE_PARAMETER: Final[Mapping[str, str]] = MappingProxyType({"mul": "out_dtype"})
"""Primitive -> the parameter that holds the dtype of its result."""

AXIS_ORDER: Final[Mapping[str, str]] = MappingProxyType({"transpose": "permutation"})
"""Primitive -> the parameter that holds, for each axis of its result, the axis of its operand."""
