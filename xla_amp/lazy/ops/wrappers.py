"""Wrappers for generated kernels that need host-side work, and kernels that call other operations.

A wrapper gets the kernel and returns the one to install.  Reasons: a flag asks for an error that only the host can
raise; the memory of an operand decides what is computed; a result is a Python number; the size of a result depends on
data; arguments are checked or moved first; a step ends there.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import math
from typing import Any

import torch

from xla_amp.common import events
from xla_amp.lazy.base import forks, shapes
from xla_amp.lazy.graph.trace import Poisoned, trace
from xla_amp.lazy.ops import dynamic_shape
from xla_amp.lazy.ops.checks.argument_rules import EACH_CALL, ArgumentRule, check_fits
from xla_amp.lazy.ops.checks.meta_results import RANK_REVEALING
from xla_amp.lazy.ops.codegen.text import make_kernel
from xla_amp.lazy.ops.index_checks import CHECKED, check_several
from xla_amp.lazy.ops.operators import Kernel, KernelTable, Wrapper, before, find
from xla_amp.lazy.programs import execute
from xla_amp.lazy.steps import step_marker
from xla_amp.lazy.tensors import host_values, tensor_io, transfer
from xla_amp.lazy.tensors.later import Read, read_later
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE
from xla_amp.lowering import table

aten = torch.ops.aten
KERNELS = KernelTable()
"""ATen name -> kernel, for operations that are composed of other operations."""


def _variant(name: str, **changes: Any) -> Kernel:
    """The kernel of an operation by a lowering with other attributes."""
    return make_kernel(dataclasses.replace(table()[name], **changes), find(name), "functional")


# -- errors of factorizations -----------------------------------------------------------------------------------------


@KERNELS.implements("_linalg_check_errors")
def _check_errors(info: torch.Tensor, api_name: str, *, is_matrix: bool) -> None:
    aten._linalg_check_errors(tensor_io.to_host(info), api_name, is_matrix=is_matrix)


def _checked(api_name: str) -> Wrapper:
    """`check_errors=True` waits for ``info``, the last result, and raises as torch does."""

    def around(kernel: Kernel) -> Kernel:
        def checked(self: torch.Tensor, *args: Any, check_errors: bool = False, **kwargs: Any) -> Any:
            results = kernel(self, *args, **kwargs)
            if check_errors:
                _check_errors(results[-1], api_name, is_matrix=self.dim() == 2)
            return results

        return checked

    return around


# -- assertions about values ------------------------------------------------------------------------------------------

_asserted: list[tuple[Read, str]] = []
"""Values that have to be true, and what to say."""


@KERNELS.implements("_assert_async", "_assert_async.msg", "_functional_assert_async.msg")
def _assert_async(
    self: torch.Tensor,
    assert_msg: str = "Expected Tensor with single nonzero value, but got zero",
    dep_token: Any = None,
) -> torch.Tensor | None:
    """Waits for nothing: the error comes with the next wait or program, as on CUDA, or when the interpreter exits.

    An observed step reads the value.
    """
    if self.numel() != 1:
        raise RuntimeError(f"torch._assert_async expects a tensor of one element, got {list(self.shape)}")
    where = events.user_location()
    text = f"{assert_msg or 'Assertion is failed'}{where and f' (asserted at {where})'}"
    found = host_values.value(self)
    if found is not None or execute.flush_begins.listeners:
        if not self.item():
            raise RuntimeError(text)
    else:
        with trace.lock:
            _asserted.append((read_later((self != 0).reshape(())), text))
    return dep_token  # type: ignore[no-any-return]


def _check_asserted() -> None:
    if not _asserted:
        return
    with trace.lock:
        ready = [each for each in _asserted if each[0].ready()]
        _asserted[:] = [each for each in _asserted if each not in ready]
    for read, text in ready:
        if (value := read.value()) is not None and not value:
            raise RuntimeError(text)


@atexit.register
def _check_at_exit() -> None:
    """Runs before JAX's handler, because Python calls the newest first.  A forked child has nothing to check."""
    if _asserted and not forks.is_forked():
        for read, _ in list(_asserted):
            read.value()  # runs what was recorded, and waits
        _check_asserted()


execute.program_ran.subscribe(_check_asserted)
execute.waited.subscribe(_check_asserted)
transfer.downloaded.subscribe(_check_asserted)


# -- factorizations that autograd keeps -------------------------------------------------------------------------------

_FACTORS = {"_linalg_det": 1, "_linalg_slogdet": 2, "_linalg_solve_ex": 1}
"""Operation -> which result is the LU factorization."""


@functools.cache
def _factors_transpose(name: str) -> bool:
    """Whether this torch factorizes the transpose of a row-major real matrix (its derivative formulas rely on it)."""
    matrix = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    arguments = (matrix, matrix) if name == "_linalg_solve_ex" else (matrix,)
    factors = getattr(aten, name).default(*arguments)[_FACTORS[name]]
    return bool(factors[0, 0] == 2.0)  # the first pivot: the greatest of column 1, 2, or of column 1, 3


def _oriented(name: str) -> Wrapper:
    def around(kernel: Kernel) -> Kernel:
        transposed = _variant(name, function=functools.partial(table()[name].function, transposed=True))

        def oriented(a: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            of_transpose = _factors_transpose(name) and a.is_contiguous() and not a.is_complex()
            return (transposed if of_transpose else kernel)(a, *args, **kwargs)

        return oriented

    return around


# -- least squares ----------------------------------------------------------------------------------------------------


def _least_squares(kernel: Kernel) -> Kernel:
    def lstsq(
        self: torch.Tensor, b: torch.Tensor, rcond: float | None = None, *, driver: str | None = None
    ) -> tuple[torch.Tensor, ...]:
        solution, residuals, rank, values = kernel(self, b, rcond, driver=driver)
        columns = self.shape[-1]
        if residuals.numel() and driver in RANK_REVEALING:
            # torch gives residuals only where every matrix has full rank, which the data knows.
            dynamic_shape.announce("torch.linalg.lstsq with a rank-revealing driver")
            if not bool((tensor_io.to_host(rank) == columns).all()):
                residuals = residuals.new_empty((0,))
        return solution, residuals, rank, values

    return lstsq


# -- attention --------------------------------------------------------------------------------------------------------


_ATTENTION = "_scaled_dot_product_fused_attention_overrideable"


def _attention(kernel: Kernel) -> Kernel:
    plain = _variant(_ATTENTION, supplies=table()[_ATTENTION].supplies - {"rng"})  # draws no random number

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: torch.Tensor | None = None,
        dropout: float = 0.0,
        *rest: Any,
        **options: Any,
    ) -> tuple[Any, ...]:
        results = (kernel if dropout > 0 else plain)(query, key, value, bias, dropout, *rest, **options)
        return *results[:4], query.shape[2], key.shape[2], *results[6:]

    return attention


# -- connectionist temporal classification: lengths are data ----------------------------------------------------------


def _ctc_operands(
    log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: Any, target_lengths: Any
) -> tuple[torch.Tensor, ...]:
    """(targets [batch, S], input lengths, target lengths), on the device."""
    steps, batch = log_probs.shape[:2]
    if len(input_lengths) != batch or len(target_lengths) != batch:
        raise RuntimeError(
            f"ctc_loss expects input_lengths and target_lengths of size {batch} (the batch), got "
            f"{len(input_lengths)} and {len(target_lengths)}"
        )
    if any(length > steps or length < 0 for length in input_lengths):
        raise RuntimeError(f"ctc_loss expects input_lengths from 0 to {steps}, got {list(input_lengths)}")
    targets = targets if targets.device.type == DEVICE_TYPE else transfer.to_device(targets)
    longest = max(target_lengths, default=0)
    if targets.dim() == 1:
        ends = torch.tensor(target_lengths, dtype=torch.int64).cumsum(0)
        if batch and targets.shape[0] != int(ends[-1]):
            raise RuntimeError(f"ctc_loss expects {int(ends[-1])} targets in all, got {targets.shape[0]}")
        starts = ends - torch.tensor(target_lengths, dtype=torch.int64)
        positions = (starts[:, None] + torch.arange(max(longest, 1))).clamp(max=max(targets.shape[0] - 1, 0))
        targets = targets if targets.shape[0] else targets.new_zeros((1,))
        targets = targets.index_select(0, transfer.to_device(positions.reshape(-1))).view(positions.shape)
    elif longest > targets.shape[1]:
        raise RuntimeError(f"ctc_loss expects targets of at least {longest} columns, got {list(targets.shape)}")
    lengths = (transfer.to_device(torch.tensor(list(ls), dtype=torch.int64)) for ls in (input_lengths, target_lengths))
    return targets, *lengths


@KERNELS.implements("_ctc_loss")
def _ctc_loss(
    log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: Any, target_lengths: Any, *options: Any
) -> Any:
    operands = _ctc_operands(log_probs, targets, input_lengths, target_lengths)
    return aten._ctc_loss.Tensor(log_probs, *operands, *options)


@KERNELS.implements("_ctc_loss_backward")
def _ctc_loss_backward(
    grad: torch.Tensor,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    *rest: Any,
) -> Any:
    operands = _ctc_operands(log_probs, targets, input_lengths, target_lengths)
    return aten._ctc_loss_backward.Tensor(grad, log_probs, *operands, *rest)


# -- forward-mode differentiation -------------------------------------------------------------------------------------


@KERNELS.implements("_new_zeros_with_same_feature_meta")
def _tangent_for(self: torch.Tensor, other: torch.Tensor, *, self_num_batch_dims: int = 0) -> torch.Tensor:
    """Zeros laid out as `other` is, behind the batch dimensions of `self`; torch would size them by its bytes."""
    batch = self.shape[:self_num_batch_dims]
    room = tensor_io.buffer_of(other).spec.size
    strides = [room * stride for stride in shapes.contiguous_strides(batch)]
    zeros = self.new_zeros((math.prod(batch) * room,))
    return zeros.as_strided([*batch, *other.shape], [*strides, *other.stride()], other.storage_offset())


# -- unsupported operations --------------------------------------------------------------------------------------


def _no_conversion_to_sparse(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError(
        "Tensor.to_sparse: on the lazy XLA device only gradients of embeddings are sparse. "
        "Keep the tensor dense, or move it to the CPU first: tensor.cpu().to_sparse()"
    )


for _name in ("", ".sparse_dim", "_bsc", "_bsr", "_csc", "_csr"):
    KERNELS[f"_to_sparse{_name}"] = _no_conversion_to_sparse


@KERNELS.implements("_nested_tensor_from_mask_left_aligned")
def _is_left_aligned(t: torch.Tensor, mask: torch.Tensor) -> bool:
    # nn.TransformerEncoder asks before it makes a nested tensor, which the device does not have: it then masks instead.
    return False


# -- arguments checked or changed before anything is recorded ---------------------------------------------------------


def _move_indices(kernel: Kernel) -> Kernel:
    """``x[i] = v`` accepts indices on the CPU, as on every torch device."""
    kernel = check_several(kernel)

    def index_put(self: torch.Tensor, indices: Any, *rest: Any, **options: Any) -> Any:
        moved = [i if i is None or i.device.type == DEVICE_TYPE else i.to(self.device) for i in indices]
        return kernel(self, moved, *rest, **options)

    return index_put


def _overwrite(written: Any, *_: Any, **options: Any) -> None:
    """For operations that ignore the old value: they may write a tensor that a failed step has poisoned."""
    for tensor in written if isinstance(written, (list, tuple)) else (written,):
        buffer = tensor.untyped_storage()._xla_amp
        whole = buffer is not None and tensor.shape == buffer.spec.shape and tensor.is_contiguous()
        if whole and type(buffer.array) is Poisoned:
            with trace.lock:
                if buffer.number < 0:
                    buffer.store(None)  # memory never written


def _checked_by(rule: ArgumentRule, name: str) -> Wrapper:
    operation, defaults = name.partition(".")[0], rule.holds.__defaults__ or ()

    def check(self: torch.Tensor, *numbers: Any, **options: Any) -> None:
        rule.check(operation, (*numbers, *defaults[len(numbers) :]))
        if operation.endswith("_"):
            _overwrite(self)

    return before(check)


def _filling(name: str) -> Wrapper:
    def check(self: torch.Tensor, *arguments: Any) -> None:
        """torch reads the value of a 0-d tensor as a number; one on the CPU is known without a wait."""
        if arguments[-1].device.type == "cpu":
            check_fits(arguments[-1].item(), (self.dtype,))

    inner: Wrapper = CHECKED.get(name, lambda kernel: kernel)
    return lambda kernel: before(check)(inner(kernel))


def _updating_scale(kernel: Kernel) -> Kernel:
    def update(*args: Any) -> Any:
        result = kernel(*args)
        step_marker.scale_is_updated()
        return result

    return update


def _traced(kernel: Kernel) -> Kernel:
    """TorchScript's tracer leaves this operation to its kernel: torch's devices call ``_convolution``."""

    def convolution(*args: Any) -> torch.Tensor:
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            return aten._convolution.default(*args, False, False, False, False)  # type: ignore[no-any-return]
        return kernel(*args)  # type: ignore[no-any-return]

    return convolution


def _size_by_channels(x: torch.Tensor, observer_on: Any, fake_quant_on: Any, *rest: Any) -> None:
    """The first call of torch.ao's observer of channels gives its empty state one element for each, as torch does."""
    state, (_, _, _, channels, *switches) = rest[:4], rest[4:]  # running_min, running_max, scale, zero_point
    if any(switches[:1]) and state[0].numel() == 0:  # per_row_fake_quant
        for tensor, value in zip(state, (math.inf, -math.inf, 1, 0), strict=True):
            tensor.resize_(x.shape[channels]).fill_(value)


_OVERWRITING = (
    "_foreach_zero_", "bernoulli_.Tensor", "fill_.Scalar", "fill_.Tensor", "random_", "random_.from", "random_.to",
    "zero_",
)  # fmt: skip
_FILLING = "index_fill.int_Tensor", "index_fill_.int_Tensor", "masked_fill.Tensor", "masked_fill_.Tensor"
WRAPPERS: dict[str, Wrapper] = {
    **CHECKED,
    **{name: _checked_by(rule, name) for rule in EACH_CALL for name in rule.operations.split()},
    **dict.fromkeys(_OVERWRITING, before(_overwrite)),
    **{name: _filling(name) for name in _FILLING},
    **dict.fromkeys(("_index_put_impl_", "_unsafe_index_put", "index_put", "index_put_"), _move_indices),
    "_amp_foreach_non_finite_check_and_unscale_": before(lambda *_: step_marker.unscales()),
    "_amp_update_scale_": _updating_scale,
    "_fused_moving_avg_obs_fq_helper": before(_size_by_channels),
    "_linalg_det": _oriented("_linalg_det"),
    "_linalg_slogdet": _oriented("_linalg_slogdet"),
    "_linalg_solve_ex": lambda kernel: _checked("torch.linalg.solve_ex")(_oriented("_linalg_solve_ex")(kernel)),
    _ATTENTION: _attention,
    "convolution": _traced,
    "index.Tensor": lambda kernel: check_several(dynamic_shape.expand_masks(kernel)),
    "linalg_cholesky_ex": _checked("torch.linalg.cholesky_ex"),
    "linalg_inv_ex": _checked("torch.linalg.inv_ex"),
    "linalg_lstsq": _least_squares,
    "linalg_lu_factor_ex": _checked("torch.linalg.lu_factor_ex"),
    "repeat_interleave.Tensor": dynamic_shape.find_length,
}
"""Operation -> wrapper of its kernel."""
