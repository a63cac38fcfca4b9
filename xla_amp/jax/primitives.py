"""The table of JAX primitives: all that autocast knows of a primitive besides its rule.

The policy decides which dtype a primitive computes in (``policy/tables``, by the ATen name that
``policy/tables/classes.toml`` gives the primitive).  This table says what else is needed to apply the decision, to find
backward passes and regions, and to report: one row for primitives that are alike, with a column for each question.  The
default, for a primitive without a row: what it computes, it computes in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, TypeAlias

PrimitiveKind: TypeAlias = Literal[
    "contraction",
    "data_movement",
    "independent",
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
``contraction``    bound as a primitive of `xla_amp.jax.low_primitives` if the policy says ``low``
``data_movement``  returns elements of its first operand unchanged: a cast commutes with it
``independent``    does not combine its operands: each keeps its dtype
``conversion``     an explicit change of dtype or precision by the user: bound as it is
``fixed_dtype``    gets the dtypes that it was traced with, since its sub-jaxpr or kernel exists for those only
the others         contain jaxprs; each has a row in `xla_amp.jax.rebind` and a rule in `...higher_order.handlers`
"""


class PrimitiveInfo(NamedTuple):
    """The columns of the table."""

    kind: PrimitiveKind | None
    """How the interpreter applies a decision; None: as a primitive without a row."""
    why: str
    passes_gradient: bool = False
    """Whether it passes a weight's gradient on, or adds it up."""
    stops_gradient: bool = False
    """Whether no gradient passes it."""
    between_devices: bool = False
    """Whether it moves elements between devices: what a contraction reads of a weight is rounded before, not after, so
    half as many bytes travel."""
    adds: bool = False
    """Whether it may add what a layer computed to what the layer read."""
    exact: bool = False
    """Whether it tells apart what a low dtype makes equal: it compares, rounds or orders, or the host reads it.  A
    product that only such primitives read keeps its float32 sums, and a number is not rounded for it."""
    picks: bool = False
    """Whether it returns elements of its operands, or their negatives, or adds them up over devices: `exact` is asked
    of those that read its results.  So it is of data movement."""
    rounded_first: bool = False
    """Whether its operand is rounded where only products read its result, since it reads and writes all of memory: a
    maximum of rounded values is the rounded maximum."""
    adds_devices: bool = False
    """Whether it, or its derivative, reduces over devices."""
    cheap: bool | None = None
    """Whether an region may compute it again, since it costs little more than reading its operands; None: as
    operations of its class do."""
    opaque: bool = False
    """Whether it computes what is no operation of the program, so that `find_overflow` sees its results only."""
    plumbing: bool = False
    """Whether it moves or makes values and rounds nothing, so that `explain` leaves it out of what is computed."""
    no_low: bool = False
    """Whether JAX has it for float32 and wider only: its operands are float32 whatever the policy says."""
    dtype_parameter: str = ""
    """The parameter that holds the dtype of its result."""
    axis_order: str = ""
    """The parameter that holds, for each axis of its result, the axis of its operand."""
    axis_places: str = ""
    """The parameter that holds, for each axis of its operand, the axis of its result."""
    indexed_by: str = ""
    """The parameter that says how its second operand indexes the first: it may return an element several times, whose
    gradients are added."""
    scaled_by: tuple[int, ...] = ()
    """The operands of which one may be a power of two, so that it rounds nothing: then it needs no float32."""
    activates: bool = False
    """Whether it is a layer's nonlinearity, which no optimizer has."""
    square: str = ""
    """The primitive that it is for a value and itself: `hpu` and `lean` let a product be low, but no square."""


def _row(kind: PrimitiveKind | None, why: str, *primitives: str, **columns: Any) -> dict[str, PrimitiveInfo]:
    return dict.fromkeys(primitives, PrimitiveInfo(kind, why, **columns))


_MOVED: Final = "elements are moved, not computed"
_APART: Final = "operands are not combined with each other"
_BETWEEN_DEVICES: Final = "elements are moved or added between devices"
_FIXED: Final = "its sub-jaxpr or kernel was traced for these dtypes"

# fmt: off
PRIMITIVES: Final[Mapping[str, PrimitiveInfo]] = MappingProxyType(
    _row(
        "contraction", "low operands, float32 accumulation, gradients of weights straight from the accumulator",
        "conv_general_dilated", "dot_general", "ragged_dot_general",
    )
    | _row(
        "data_movement", _MOVED,
        "copy_p", "dynamic_slice", "rev",
        passes_gradient=True,
    )
    | _row("data_movement", _MOVED, "gather", passes_gradient=True, indexed_by="dimension_numbers")
    | _row("data_movement", _MOVED, "pbroadcast", "pcast", "pvary", passes_gradient=True, adds_devices=True)
    | _row("data_movement", _MOVED, "copy", passes_gradient=True, plumbing=True)
    | _row(
        "data_movement", _MOVED,
        "broadcast_in_dim",
        passes_gradient=True, cheap=True, plumbing=True, axis_places="broadcast_dimensions",
    )
    | _row("data_movement", _MOVED, "reshape", "squeeze", passes_gradient=True, cheap=True, plumbing=True)
    | _row("data_movement", _MOVED, "slice", passes_gradient=True, cheap=True)
    | _row(
        "data_movement", _MOVED,
        "transpose",
        passes_gradient=True, cheap=True, plumbing=True, axis_order="permutation",
    )
    | _row(
        "data_movement", "elements are moved between devices",
        "all_gather", "all_gather_invariant",
        passes_gradient=True, between_devices=True, adds_devices=True,
    )
    | _row(
        "data_movement", "elements are moved between devices",
        "reshard", "sharding_constraint",
        passes_gradient=True, between_devices=True,
    )
    | _row("independent", _APART, "all_to_all", "optimization_barrier", "ppermute", picks=True)
    | _row("independent", _APART, "sort", exact=True)
    | _row("independent", _APART, "pmax", "pmin", picks=True, adds_devices=True)
    | _row(
        "independent", _APART,
        "psum", "psum_invariant", "reduce_scatter",
        passes_gradient=True, picks=True, adds_devices=True,
    )
    | _row(None, "it selects its operands and rounds none of them", "clamp", "max", "min", "select_n", picks=True)
    | _row(
        None, "it compares its operands and rounds none of them",
        "eq", "eq_to", "ge", "gt", "le", "le_to", "lt", "lt_to", "ne",
        exact=True,
    )
    | _row(
        None, "its result depends on which values are equal, or on which integer is next",
        "argmax", "argmin", "ceil", "floor", "is_finite", "round", "top_k",
        exact=True,
    )
    | _row(
        None, "it picks elements of its operands",
        "abs", "cummax", "cummin", "dynamic_update_slice", "neg", "pad", "reduce_max", "reduce_min",
        "split", "stack", "tile", "unstack",
        picks=True,
    )
    | _row(None, "it picks elements of its operands", "concatenate", picks=True, cheap=True)
    | _row(
        None, "it picks an element of each window",
        "reduce_window_max", "reduce_window_min",
        picks=True, rounded_first=True,
    )
    | _row("conversion", "the user asked for this dtype", "convert_element_type", passes_gradient=True)
    | _row("conversion", "the user asked for this precision", "reduce_precision")
    | _row(
        "fixed_dtype", _FIXED,
        "addupdate", "bitcast_convert_type", "custom_transpose_call", "get", "new_ref", "reduce",
        "reduce_window", "ref_get", "ref_set", "ref_swap", "scatter", "scatter-add", "scatter-max", "scatter-min",
        "scatter-mul", "scatter-sub", "scatter_add", "select_and_gather_add", "select_and_scatter",
        "select_and_scatter_add", "swap",
    )
    | _row(
        "fixed_dtype", _FIXED,
        "call_exported", "custom_lin", "ffi_call", "run_state",
        opaque=True,
    )
    | _row("fixed_dtype", _FIXED, "approx_top_k", "check", exact=True)
    | _row("fixed_dtype", "JAX 0.12 searches a sorted array with it", "call_hi_primitive", exact=True)
    | _row(
        "fixed_dtype", _FIXED,
        "debug_callback", "debug_print", "io_callback", "pure_callback",
        exact=True, opaque=True,
    )
    | _row(
        "fixed_dtype", "the kernel was built for these dtypes; only its caller can request others",
        "custom_partitioning", "pallas_call", "triton_kernel_call",
        opaque=True,
    )
    | _row(
        "fixed_dtype", "a solver compares residuals, which low products would not let converge",
        "custom_linear_solve",
        opaque=True,
    )
    | _row(
        None, "JAX has it in float32 and wider dtypes only",
        "cholesky", "cholesky_update", "complex", "conj", "eig", "eigh", "fft", "geqp3", "geqrf", "hessenberg",
        "householder_product", "lu", "ormqr", "qr", "schur", "svd", "triangular_solve", "tridiagonal",
        "tridiagonal_solve",
        no_low=True,
    )
    | _row("call", "a named function", "closed_call", "core_call", "eval_jaxpr", "jit", "pjit")
    | _row("checkpoint", "a function that the backward pass recomputes", "checkpoint", "remat", "remat2")
    | _row("scan", "a loop over a leading axis", "scan")
    | _row("while", "a loop until a condition", "while")
    | _row("cond", "one of several functions", "cond")
    | _row("custom_jvp", "a function with its own derivative", "custom_jvp_call")
    | _row("custom_vjp", "a function with its own derivative", "custom_vjp_call")
    | _row("composite", "a named function that the backend may replace", "composite")
    | _row("custom_vmap", "a function with its own batching rule", "custom_vmap_call")
    | _row("linear_call", "a function with its own transpose", "linear_call")
    | _row("shard_map", "a function of one device's shard", "shard_map")
    | _row(None, "it adds two arrays", "add", adds=True)
    | _row(None, "it adds up gradients", "add_any", passes_gradient=True)
    | _row(None, "it adds up gradients", "unreduced_psum", passes_gradient=True, adds_devices=True)
    | _row(
        None, "a long series, or a loop",
        "digamma", "erf_inv", "igamma", "igammac", "lgamma", "polygamma", "zeta",
        cheap=False,
    )
    | _row(None, "a layer's nonlinearity", "cos", "erf", "logistic", "sin", "tanh", activates=True)
    | _row(None, "it divides two arrays", "div", scaled_by=(1,))
    | _row(None, "what a remainder of a count is depends on each digit of the count", "rem", exact=True)
    | _row(None, "it moves what it gets", "device_put", "expand_dims", plumbing=True)
    | _row(None, "it moves what it gets", "stop_gradient", cheap=True, plumbing=True, stops_gradient=True)
    | _row(None, "it counts", "iota", picks=True, cheap=True)
    | _row(
        None, "it moves or makes values, or computes no floats",
        "after_all", "and", "axis_index", "bcoo_extract", "bcoo_fromdense", "bcoo_sort_indices",
        "bcoo_todense", "bcoo_transpose", "bcsr_extract", "bcsr_fromdense", "bcsr_todense", "broadcast_to",
        "clz", "coo_fromdense", "coo_todense", "create_token", "csr_fromdense", "csr_todense", "dce_sink",
        "delay", "dim_as_value", "dimension_size", "empty", "empty2", "empty_ref", "free_ref", "freeze",
        "from_edtype", "get_global", "inspect_sharding", "iota_2x32_shape", "layout_constraint",
        "lu_pivots_to_permutation", "mulhi", "multiple_of", "name", "not", "num_programs", "or", "philox2x32",
        "philox4x32", "pin", "platform_index", "population_count", "program_id", "random_bits",
        "random_clone", "random_fold_in", "random_seed", "random_split", "random_unwrap", "random_wrap",
        "reduce_and", "reduce_or", "reduce_xor", "relayout", "rng_bit_generator", "semaphore_read",
        "semaphore_signal", "semaphore_wait", "shape_assertion", "shift_left", "shift_right_arithmetic",
        "shift_right_logical", "threefry2x32", "threefry4x32", "tie", "to_edtype", "todense", "unpin",
        "unreachable", "with_memory_space_constraint", "xla_metadata_value", "xor", "zeros_like",
        picks=True,
    )
    | _row(
        None, _BETWEEN_DEVICES,
        "all_gather_done", "all_gather_reduced", "all_gather_reduced_start", "all_gather_start",
        "all_to_all_done", "all_to_all_start", "pbroadcast_done", "pbroadcast_dynamic", "pbroadcast_start",
        "ppermute_done", "ppermute_start", "precv", "preduced", "psend", "psum_done", "psum_invariant_start",
        "psum_start", "ragged_all_to_all", "reduce_scatter_done", "reduce_scatter_start", "reduced_vary_cast",
        "reduced_vary_cast_p", "unreduced_pmax", "unreduced_pmin", "unreduced_psum_start",
        "unreduced_reduce_scatter", "unreduced_reduce_scatter_start", "vary_unreduced_cast",
        "vary_unreduced_cast_p",
        picks=True, adds_devices=True,
    )
    | _row(
        None, "a sampler, a sum, or a function with large slopes: float32",
        "bcoo_dot_general", "bcoo_dot_general_sampled", "bcoo_spdot_general", "bcoo_sum_duplicates",
        "bcsr_dot_general", "coo_matmat", "coo_matvec", "coo_spmm", "coo_spmv", "csr_matmat", "csr_matvec",
        "csr_spmm", "csr_spmv", "igamma_grad_a", "log2", "one_minus_square", "polynomial", "random_gamma",
        "reciprocal", "regularized_incomplete_beta", "rng_uniform", "spsolve", "symmetric_product",
    )
    | _row(
        "fixed_dtype", _FIXED,
        "accum_grad_in_ref", "box_get", "box_set", "call", "call_hi_primitive_linearized", "core_map",
        "create_linear", "cudnn_fusion", "custom_jvp_call_jaxpr", "dot_product_attention_bwd",
        "dot_product_attention_bwd_wrapper", "dot_product_attention_fp8_bwd",
        "dot_product_attention_fp8_bwd_wrapper", "dot_product_attention_fp8_fwd",
        "dot_product_attention_fp8_fwd_wrapper", "dot_product_attention_fwd",
        "dot_product_attention_fwd_wrapper", "jaxpr_call", "log_extend", "log_read", "masked_load",
        "masked_swap", "mpmd_map", "new_box", "new_log", "program_order", "remat_opt", "run_scoped",
        "scaled_matmul", "scaled_matmul_wrapper", "stage", "xla_metadata_call",
        opaque=True,
    )
    | _row(
        None, "its result may have another dtype",
        "mul",
        dtype_parameter="out_dtype", square="square", scaled_by=(0, 1),
    )
)
"""Primitive name -> row."""
# fmt: on

NO_ROW: Final = PrimitiveInfo(None, "")


@functools.cache
def info(primitive: str) -> PrimitiveInfo:
    """The row of a primitive, by its name; a row without anything for one that has none."""
    return PRIMITIVES.get(primitive, NO_ROW)


def name_of(eqn: Any) -> str:
    """Name of the primitive whose rule decides an equation: the product of a value with itself is a square."""
    primitive: str = eqn.primitive.name
    square = info(primitive).square
    return square if square and eqn.invars[0] is eqn.invars[1] else primitive
