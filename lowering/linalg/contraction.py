"""Contractions: matrix products, their fused forms, and products of groups of rows.

Every matrix product goes through `contract`, so only this module knows the forms that a platform needs
(lowering/README.md has the figures):

=========  ================================================================================================
platform   float16 and bfloat16 operands
=========  ================================================================================================
cpu        ``low x low -> float32``, rounded afterwards; transposes folded into the dimension numbers; a left
           operand whose contracted axis is not its last is transposed first, in blocks.  bfloat16 on a CPU
           without instructions for it: both operands are converted to float32 first (not where the left one
           would be transposed)
gpu, tpu   ``low x low -> low``; the accumulator is float32 in the hardware.  On gpu ``-> float32`` where something
           is added before the one rounding; but a bias is added to a large product in their own dtype: cuBLAS does
           it in the product, in float32, where XLA lets it (`_is_added_by_cublas`)
=========  ================================================================================================

float32 operands are contracted at `lax.Precision.HIGHEST` everywhere: float32 then means float32, as in torch, where
TPU would otherwise round the operands to bfloat16 and GPU to TF32.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from xla_amp import hardware
from xla_amp.lowering import forms
from xla_amp.lowering.operand import Biased, Permuted, as_dtype, is_half, materialize, opmath, sums_of_rows, up
from xla_amp.lowering.registry import register

_BLOCKS = (64, 32, 16, 8)
"""Tile edges of the blocked transpose, best first."""
_PADDED_BLOCK = 32
"""Tile edge where no edge in `_BLOCKS` divides both extents; the operand is padded up to it."""

_ALIGNED: Final = 8
"""cuBLAS's kernels for 16-bit operands want extents in multiples of it."""
_WIDE: Final = 512
_LARGE: Final = 2**34
"""Least extent, and multiplications, of a product that is padded: a padded copy then takes a small part of its time."""

Operand: TypeAlias = jax.Array | Permuted
Axes: TypeAlias = tuple[int, ...]


def precision(dtype: Any) -> lax.Precision | None:
    """The precision of dots and convolutions over `dtype`: highest for float32, otherwise the platform's default."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


_SOME_FAIL = jax.__version_info__ < (0, 10, 2)
"""Whether XLA has no kernel for some gradients' products in bfloat16 on a CPU without AMX: they are computed wide."""


def contract(
    left: Operand,
    right: Operand,
    contracting: tuple[Axes, Axes],
    batch: tuple[Axes, Axes] = ((), ()),
    *,
    platform: str,
    wide: bool = False,
) -> jax.Array:
    """`lax.dot_general` in the form that `platform` runs fast.

    Args:
        left, right: operands of one dtype, each with at most one axis that is neither contracted nor a batch axis.
        contracting, batch: axes of the left and of the right operand, as torch sees them (after a permutation).
        platform: "cpu", "gpu" or "tpu".
        wide: return the float32 accumulator of half operands on every platform.

    Returns:
        The batch axes, then the free axis of each operand.  dtype: that of the operands, but float32 for half
        operands with `wide` or on CPU.
    """
    left, left_contracting, left_batch = base(left, contracting[0], batch[0])
    right, right_contracting, right_batch = base(right, contracting[1], batch[1])
    half = is_half(left.dtype)
    if half and platform == "cpu" and left.ndim == right.ndim == len(left_batch) + 2:
        rows = left_contracting == (left.ndim - 1,)
        cpu = hardware.processor()
        fails = _SOME_FAIL and "amx_bf16" not in cpu.flags
        if left.dtype == jnp.bfloat16 and (not cpu.multiplies_bfloat16 if rows else fails):
            left, right = up(left), up(right)
        else:
            left, left_contracting = _contracted_last(left, left_contracting[0], left_batch)
    call = Product(
        left=left,
        right=right,
        axes=((left_contracting, right_contracting), (left_batch, right_batch)),
        dtype=jnp.float32 if half and (wide or platform == "cpu") else None,
        platform=platform,
    )
    form = forms.choose("product", FORMS, call) if call.may_be_padded else PLAIN
    return form.compute(call)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
    """One call of `lax.dot_general`."""

    left: jax.Array
    right: jax.Array
    axes: tuple[tuple[Axes, Axes], tuple[Axes, Axes]]
    """Contracted axes of both operands, batch axes of both."""
    dtype: Any
    """Of the result; None is that of the operands."""
    platform: str

    @property
    def summary(self) -> str:
        """Sizes and dtype, for people."""
        return f"{'x'.join(map(str, self.left.shape))} by {'x'.join(map(str, self.right.shape))}, {self.left.dtype}"

    @property
    def may_be_padded(self) -> bool:
        """Whether it is a large product of two half matrices on GPU, of which an extent is no multiple of 8."""
        if self.platform != "gpu" or self.left.ndim != 2 or self.axes[1][0] or not is_half(self.left.dtype):
            return False
        extents = (*self.left.shape, self.right.size // self.right.shape[self.axes[0][1][0]])
        return min(extents) >= _WIDE and math.prod(extents) >= _LARGE and any(each % _ALIGNED for each in extents)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductForm(forms.Form[Product]):
    """One way to compute a product."""

    compute: Callable[[Product], jax.Array]


def _plain(call: Product) -> jax.Array:
    return lax.dot_general(
        call.left, call.right, call.axes, precision=precision(call.left.dtype), preferred_element_type=call.dtype
    )


def _padded(call: Product) -> jax.Array:
    """The product of both matrices with zeros up to a multiple of 8 in each extent, without what these add."""
    (((rows,), (columns,)), _) = call.axes
    shape = call.left.shape[1 - rows], call.right.shape[1 - columns]
    left, right = (jnp.pad(x, [(0, -extent % _ALIGNED) for extent in x.shape]) for x in (call.left, call.right))
    return _plain(dataclasses.replace(call, left=left, right=right))[: shape[0], : shape[1]]


PLAIN: Final = ProductForm(name="plain", why="one operation of XLA", compute=_plain)
FORMS: Final = (
    ProductForm(
        name="padded",
        why="cuBLAS's kernels need extents in eights; XLA pads only what it has chosen for cuBLAS",
        platforms=("gpu",),
        compute=_padded,
    ),
    PLAIN,
)
"""Forms of a product for which `Product.may_be_padded`."""


def base(operand: Operand, contracting: Axes, batch: Axes) -> tuple[jax.Array, Axes, Axes]:
    """An operand without a deferred permutation, with its contracted and its batch axes."""
    if not isinstance(operand, Permuted):
        return operand, contracting, batch
    order = operand.permutation
    return operand.base, tuple(order[axis] for axis in contracting), tuple(order[axis] for axis in batch)


def _contracted_last(x: jax.Array, contracted: int, batch: Axes) -> tuple[jax.Array, Axes]:
    """`x`, a batch of matrices, with its contracted axis last, in a form that XLA cannot fold back.

    XLA:CPU's low-precision kernels need the left operand's contracted axis last, and XLA:CPU's transpose of two axes is
    slow, so tiles are moved as units.  The barrier keeps the compiler from undoing it.  If nothing is to move, the
    barrier still keeps XLA from folding in a transpose that produced `x`: XLA chooses the kernel before it folds, and
    the program then fails when it runs ("Unsupported element type for DotThunk", jaxlib 0.10).
    """
    last = x.ndim - 1
    if contracted == last:
        return lax.optimization_barrier(x), (contracted,)
    if batch != tuple(range(last - 1)):
        return x, (contracted,)
    *lead, depth, rows = x.shape
    block = next((edge for edge in _BLOCKS if depth % edge == 0 and rows % edge == 0), _PADDED_BLOCK)
    pad_depth, pad_rows = -depth % block, -rows % block
    if pad_depth or pad_rows:
        x = jnp.pad(x, [(0, 0)] * len(lead) + [(0, pad_depth), (0, pad_rows)])
    tiles = x.reshape(*lead, (depth + pad_depth) // block, block, (rows + pad_rows) // block, block)
    n = len(lead)
    x = tiles.transpose(*range(n), n + 2, n + 3, n, n + 1).reshape(*lead, rows + pad_rows, depth + pad_depth)
    return lax.optimization_barrier(x[..., :rows, :depth]), (last,)


def scaled(x: jax.Array, factor: Any) -> jax.Array:
    """``factor * x`` in the dtype of `x`; `x` itself for the Python number 1."""
    return x if isinstance(factor, (int, float)) and factor == 1 else as_dtype(factor, x.dtype) * x


def accumulate(start: Operand, product: jax.Array, beta: Any, alpha: Any, dtype: Any) -> jax.Array:
    """``beta * start + alpha * product`` in the opmath of `dtype`; `start` is ignored (may be NaN) where beta is 0."""
    product = scaled(as_dtype(product, opmath(dtype)), alpha)
    if isinstance(beta, (int, float)) and beta == 0:
        return product
    start = scaled(as_dtype(materialize(start), product.dtype), beta)
    if not isinstance(beta, (int, float)):
        start = jnp.where(beta == 0, jnp.zeros((), start.dtype), start)
    return start + product


@register("mm", takes=(Permuted,))
def mm(left: Operand, right: Operand, *, platform: str, wide: bool = False) -> jax.Array:
    return contract(left, right, ((1,), (0,)), platform=platform, wide=wide)


@register("_int_mm")
def int_mm(left: jax.Array, right: jax.Array) -> jax.Array:
    """The product of int8 matrices in int32."""
    return jnp.matmul(left, right, preferred_element_type=jnp.int32)


@register("bmm", takes=(Permuted,))
def bmm(left: Operand, right: Operand, *, platform: str, wide: bool = False) -> jax.Array:
    return contract(left, right, ((2,), (1,)), ((0,), (0,)), platform=platform, wide=wide)


@register("mv", takes=(Permuted,))
def mv(matrix: Operand, vector: Operand, *, platform: str) -> jax.Array:
    return contract(matrix, vector, ((1,), (0,)), platform=platform)


@register("dot", takes=(Permuted,))
def dot(left: Operand, right: Operand, *, platform: str) -> jax.Array:
    return contract(left, right, ((0,), (0,)), platform=platform)


@register("vdot")
def vdot(left: jax.Array, right: jax.Array, *, platform: str) -> jax.Array:
    return contract(jnp.conj(left), right, ((0,), (0,)), platform=platform)


@register("addmm", takes=(Permuted,))
def addmm(start: Operand, left: Operand, right: Operand, *, beta: Any = 1, alpha: Any = 1, platform: str) -> jax.Array:
    if _is_added_by_cublas(start, left, right, beta, alpha, platform):
        return _biased(start, left, right, platform).materialize()
    return accumulate(start, mm(left, right, platform=platform, wide=platform == "gpu"), beta, alpha, left.dtype)


_EPILOGUE: Final = 2**20
"""Elements of a sum from which on its product and bias are in their own dtype on GPU.  Smaller arrays stay in cache."""


def _is_added_by_cublas(start: Operand, left: Operand, right: Operand, beta: Any, alpha: Any, platform: str) -> bool:
    """Whether ``product + start`` is the form that XLA turns into cuBLAS's epilogue: a bias that each row gets."""
    plain = all(isinstance(factor, (int, float)) and factor == 1 for factor in (beta, alpha))
    is_bias = start.shape[-1:] == right.shape[1:] and math.prod(start.shape[:-1]) == 1
    size = left.shape[0] * right.shape[1]
    return platform == "gpu" and plain and is_bias and is_half(left.dtype) and size >= _EPILOGUE


def _biased(bias: Operand, left: Operand, right: Operand, platform: str) -> Biased:
    product = mm(left, right, platform=platform)
    return Biased(product, as_dtype(materialize(bias), product.dtype).reshape(-1))


@register("linear", takes=(Permuted,))
def linear(x: Operand, weight: Operand, bias: Operand | None = None, *, platform: str) -> jax.Array | Biased:
    """Product of the rows of `x`, along its last axis, with those of `weight`; a bias is added before the rounding.

    With a kernel for it, torch's autograd records one operation, not a product between views.
    """
    rows, columns = _rows(x), _transposed(_rows(weight))
    shape = *x.shape[:-1], *weight.shape[:-1]
    if bias is not None and _is_added_by_cublas(bias, rows, columns, 1, 1, platform):
        low = _biased(bias, rows, columns, platform)
        return dataclasses.replace(low, product=low.product.reshape(shape))
    product = mm(rows, columns, platform=platform) if bias is None else addmm(bias, rows, columns, platform=platform)
    return product.reshape(shape)


@register("linear_backward", takes=(Permuted,))
def linear_backward(
    x: Operand, grad: Operand, weight: Operand, output_mask: Sequence[bool], *, platform: str, wide: bool = False
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    """The gradients of real numbers, a matrix `weight` and a vector of biases."""
    rows, grad_x, grad_weight, grad_bias = _rows(grad), None, None, None
    if output_mask[0]:
        grad_x = mm(rows, weight, platform=platform).reshape(x.shape)
    if output_mask[1]:
        grad_weight = mm(_transposed(rows), _rows(x), platform=platform, wide=wide)
    if output_mask[2]:
        (grad_bias,) = sums_of_rows([up(materialize(rows))], 1, platform)
    return grad_x, grad_weight, grad_bias


def _rows(x: Operand) -> Operand:
    """`x` as a matrix, whose rows are along the last axis."""
    return x if x.ndim == 2 else materialize(x).reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _transposed(matrix: Operand) -> Operand:
    return matrix.base if isinstance(matrix, Permuted) else Permuted(matrix, (1, 0))


@register("addmv", takes=(Permuted,))
def addmv(
    start: Operand, matrix: Operand, vector: Operand, *, beta: Any = 1, alpha: Any = 1, platform: str
) -> jax.Array:
    product = contract(matrix, vector, ((1,), (0,)), platform=platform, wide=platform == "gpu")
    return accumulate(start, product, beta, alpha, matrix.dtype)


@register("baddbmm", takes=(Permuted,))
def baddbmm(
    start: Operand, left: Operand, right: Operand, *, beta: Any = 1, alpha: Any = 1, platform: str
) -> jax.Array:
    return accumulate(start, bmm(left, right, platform=platform, wide=platform == "gpu"), beta, alpha, left.dtype)


@register("addbmm", takes=(Permuted,))
def addbmm(start: Operand, left: Operand, right: Operand, *, beta: Any = 1, alpha: Any = 1, platform: str) -> jax.Array:
    products = contract(left, right, ((2,), (1,)), ((0,), (0,)), platform=platform, wide=True)
    return accumulate(start, jnp.sum(products, axis=0, dtype=products.dtype), beta, alpha, left.dtype)


@register("_addmm_activation", takes=(Permuted,))
def addmm_activation(
    start: Operand,
    left: Operand,
    right: Operand,
    *,
    beta: Any = 1,
    alpha: Any = 1,
    use_gelu: bool = False,
    platform: str,
) -> jax.Array:
    # torch rounds the sum before the activation, except where cuBLASLt fuses the two
    y = addmm(start, left, right, beta=beta, alpha=alpha, platform=platform)
    return jax.nn.gelu(y, approximate=False) if use_gelu else jax.nn.relu(y)


# ---- grouped products ------------------------------------------------------------------------------------------------


@register("_grouped_mm")
def grouped_mm(
    left: jax.Array,
    right: jax.Array,
    offsets: jax.Array | None = None,
    bias: jax.Array | None = None,
    out_dtype: Any = None,
    *,
    platform: str,
) -> jax.Array:
    """``left[m, k] @ right[g, k, n]``, or grouped over k (both 2-d), over n (`left` 3-d) or not at all (both 3-d)."""
    if offsets is None:
        product = contract(left, right, ((2,), (1,)), ((0,), (0,)), platform=platform)
    else:
        sizes = jnp.diff(offsets, prepend=jnp.zeros(1, offsets.dtype))
        if left.ndim == 2 and right.ndim == 2:
            product = _ragged(left, right, sizes, contracting=(1, 0), ragged=1, group=(), platform=platform)
        elif left.ndim == 2:
            product = _ragged(left, right, sizes, contracting=(1, 1), ragged=0, group=(0,), platform=platform)
        else:
            # left[g, m, k] @ right[k, n], grouped over n, is the transpose of the form above.
            product = _ragged(right, left, sizes, contracting=(0, 2), ragged=1, group=(0,), platform=platform).T
    return product if bias is None else product + as_dtype(bias, product.dtype)


def _ragged(
    left: jax.Array,
    right: jax.Array,
    sizes: jax.Array,
    *,
    contracting: tuple[int, int],
    ragged: int,
    group: tuple[int, ...],
    platform: str,
) -> jax.Array:
    """A dot whose left axis `ragged` is split into groups of `sizes`; `group` is the right operand's group axis."""
    if is_half(left.dtype) and platform == "cpu":  # XLA:CPU has no half dot in the form that XLA expands this to
        left, right = up(left), up(right)
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((contracting[0],), (contracting[1],)), ((), ())),
        lhs_ragged_dimensions=[ragged],
        rhs_group_dimensions=list(group),
    )
    return lax.ragged_dot_general(left, right, sizes, numbers, precision=precision(left.dtype))
