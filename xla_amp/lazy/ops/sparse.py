"""Sparse gradients: COO tensors on the lazy device, for embeddings with ``sparse=True``.

A sparse tensor is torch's: two tensors of the device, indices and values, behind the dispatch key SparsePrivateUse1.
torch's kernels that only use these two as tensors (return, scale or copy them) are used as they are; the others are
written here.

XLA compiles for fixed sizes, and the number of distinct rows in a batch depends on data.  So coalescing keeps the
number of entries: the sums come first, in order, and each unused entry has the value zero and an index past the end
(``size[0]``, then zeros).  Operations that add or read rows skip such entries, and a copy to another device drops them.
Nothing is read back, and batches of one size share an executable; only ``_nnz()`` counts the entries before coalescing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import torch

from xla_amp.errors import MissingLoweringError
from xla_amp.lazy.graph.trace import Instruction, Spec, instruction_cache, record, spec, trace
from xla_amp.lazy.ops import operators
from xla_amp.lazy.tensors import tensor_io
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE

aten = torch.ops.aten
_copy_sparse: Callable[..., torch.Tensor] = aten.copy_sparse_to_sparse_
_make_unchecked = operators.on_key("_sparse_coo_tensor_with_dims_and_tensors", "SparseCPU")
_indices: Callable[..., torch.Tensor] = aten._indices.default
_values: Callable[..., torch.Tensor] = aten._values.default

FROM_TORCH: Sequence[str] = (
    "_coalesced_",
    "_dimI",
    "_dimV",
    "_indices",
    "_nnz",
    "_sparse_coo_tensor_with_dims",
    "_sparse_coo_tensor_with_dims_and_tensors",
    "_values",
    "clone",
    "copy_sparse_to_sparse_",
    "dense_dim",
    "empty.memory_format",
    "empty_like",
    "indices",
    "is_coalesced",
    "is_same_size",
    "resize_as_sparse_",
    "sparse_dim",
    "sparse_resize_",
    "sparse_resize_and_clear_",
    "values",
    "zero_",
)
"""Operations whose CPU kernel reads no memory: it calls operations on the indices and values."""

_instructions = instruction_cache()


def _recorded(
    name: str,
    emit: Callable[..., Sequence[jax.Array]],
    outs: tuple[Spec, ...],
    *tensors: torch.Tensor,
    fixed: Any = None,
) -> int:
    """Records ``emit(*arrays)``; returns the number of its first result.  `fixed` is any other key of `emit`."""
    numbers, specs = zip(*(tensor_io.read(tensor) for tensor in tensors), strict=True)
    key = (name, specs, outs, fixed)
    instruction = _instructions.get(key)
    if instruction is None:

        def emitted(context: Any, inputs: Any, *_: Any) -> list[jax.Array]:
            return list(emit(*inputs))

        instruction = _instructions[key] = Instruction(name, emitted, outs, len(tensors))
    return record(instruction, *numbers)


def _new(name: str, emit: Callable[..., Any], outs: tuple[Spec, ...], *tensors: torch.Tensor, fixed: Any = None) -> Any:
    with trace.lock:
        first = _recorded(name, emit, outs, *tensors, fixed=fixed)
        made = [tensor_io.new_tensor(value_spec, first + index) for index, value_spec in enumerate(outs)]
    return made[0] if len(made) == 1 else made


def _spec_of(tensor: torch.Tensor) -> Spec:
    return spec(tuple(tensor.shape), tensor.dtype)


def _make(indices: torch.Tensor, values: torch.Tensor, size: Sequence[int], coalesced: bool) -> torch.Tensor:
    """A sparse tensor of two tensors of the device, unchecked."""
    sparse_dims = indices.shape[0]
    made: torch.Tensor = _make_unchecked(
        *(sparse_dims, len(size) - sparse_dims, list(size), indices, values),
        dtype=values.dtype,
        layout=torch.sparse_coo,
        device=values.device,
        pin_memory=False,
        is_coalesced=coalesced,
    )
    return made


def _like(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """`tensor` with other values."""
    return _make(_indices(tensor), values, tensor.shape, tensor.is_coalesced())


def coalesce(tensor: torch.Tensor) -> torch.Tensor:
    """Sums the entries of each index, in the order of the indices; the module's docstring explains unused entries.

    Half types are summed in float32 and rounded once, as torch does on a GPU.
    """
    indices, values = _indices(tensor), _values(tensor)
    sizes = tuple(tensor.shape[: indices.shape[0]])

    def emit(positions: jax.Array, entries: jax.Array) -> tuple[jax.Array, jax.Array]:
        count = positions.shape[1]
        if count == 0:
            return positions, entries
        flat = _flat(positions, sizes)
        order = jnp.argsort(flat, stable=True)
        flat = flat[order]
        begins = jnp.concatenate([jnp.zeros(1, bool), flat[1:] != flat[:-1]])
        group = jnp.cumsum(begins)
        half = entries.dtype in (jnp.float16, jnp.bfloat16)
        wide = entries[order].astype(jnp.float32) if half else entries[order]
        sums = jax.ops.segment_sum(wide, group, count, indices_are_sorted=True)
        unused = jnp.full(count, math.prod(sizes), flat.dtype)
        return _unflatten(unused.at[group].set(flat), sizes), sums.astype(entries.dtype)

    outs = _spec_of(indices), _spec_of(values)
    new_indices, new_values = _new("coalesce", emit, outs, indices, values, fixed=sizes)
    return _make(new_indices, new_values, tensor.shape, True)


def _flat(positions: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
    """int64 (n): row-major offset of each index; ``prod(sizes)`` if it is past the end."""
    flat = jnp.zeros(positions.shape[1], positions.dtype)
    for extent, index in zip(sizes, positions, strict=True):
        flat = flat * extent + index
    return jnp.minimum(flat, math.prod(sizes))


def _unflatten(flat: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
    """int64 (dims, n): the inverse of `_flat`."""
    positions = []
    for extent in reversed(sizes[1:]):
        positions.append(flat % extent)
        flat = flat // extent
    return jnp.stack([flat, *reversed(positions)])


def _add_rows(dense: jax.Array, positions: jax.Array, entries: jax.Array) -> tuple[jax.Array]:
    return (dense.at[tuple(positions)].add(entries.astype(dense.dtype), mode="drop"),)


def _plus(dense: torch.Tensor, tensor: torch.Tensor, alpha: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The arguments of `_add_rows`; raises as torch does if the shapes differ."""
    if dense.shape != tensor.shape:
        raise RuntimeError(
            f"add: expected 'self' and 'other' to have the same size, but self has size {list(dense.shape)} while "
            f"other has size {list(tensor.shape)} (sparse tensors are not broadcast)"
        )
    values = _values(tensor)
    return dense, _indices(tensor), values if alpha == 1 else values * alpha


def add(self: torch.Tensor, other: torch.Tensor, *, alpha: Any = 1) -> torch.Tensor:
    """Dense or sparse plus sparse."""
    if self.is_sparse:
        return _joined(self, other, alpha)
    dtype = torch.promote_types(self.dtype, other.dtype)
    return add_(self.to(dtype, copy=True), other, alpha=alpha)


def add_(self: torch.Tensor, other: torch.Tensor, *, alpha: Any = 1) -> torch.Tensor:
    """Dense or sparse plus sparse, in place."""
    if not self.is_sparse:
        arguments = _plus(self, other, alpha)
        with trace.lock:
            tensor_io.write(self, _recorded("add_sparse_", _add_rows, (_spec_of(self),), *arguments))
        return self
    return _copy_sparse(self, _joined(self, other, alpha))


def _joined(self: torch.Tensor, other: torch.Tensor, alpha: Any) -> torch.Tensor:
    if not other.is_sparse:
        raise RuntimeError("add(sparse, dense) is not supported. Use add(dense, sparse) instead.")
    _plus(self, other, 1)
    indices = torch.cat([_indices(self), _indices(other)], 1)
    other_values = _values(other) if alpha == 1 else _values(other) * alpha
    return _make(indices, torch.cat([_values(self), other_values]), self.shape, False)


def _scaled(name: str) -> Callable[..., torch.Tensor]:
    """``div`` or ``mul`` of a sparse tensor by one number; in place if the name ends so."""
    operation = getattr(torch.Tensor, name)

    def scaled(self: torch.Tensor, other: Any, **options: Any) -> torch.Tensor:
        values = operation(_values(self), _number(self, other, name), **options)
        return self if name.endswith("_") else _like(self, values)

    return scaled


def _number(self: torch.Tensor, other: Any, name: str) -> Any:
    if self.is_sparse and not (isinstance(other, torch.Tensor) and (other.dim() or other.is_sparse)):
        return other
    raise _unsupported(f"{name} of a sparse tensor and one that is not a single number")


def sparse_mask(self: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The entries of the dense `self` at the indices of `mask`."""
    if self.is_sparse:
        raise _unsupported("sparse_mask of a sparse tensor")
    if self.shape != mask.shape:
        raise RuntimeError(
            f"sparse_mask: operands have incompatible sizes; self has size {list(self.shape)} but mask has size "
            f"{list(mask.shape)}"
        )

    def emit(dense: jax.Array, positions: jax.Array) -> tuple[jax.Array]:
        return (dense.at[tuple(positions)].get(mode="fill", fill_value=0),)

    value_spec = spec(tuple(_values(mask).shape), self.dtype)
    return _make(
        _indices(mask),
        _new("sparse_mask", emit, (value_spec,), self, _indices(mask)),
        mask.shape,
        mask.is_coalesced(),
    )


def to_dense(self: torch.Tensor, dtype: torch.dtype | None = None, masked_grad: bool | None = None) -> torch.Tensor:
    """The dense tensor; entries of one index are added."""
    return add_(torch.zeros(self.shape, dtype=dtype or self.dtype, device=self.device), self)


def to_copy(
    self: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> torch.Tensor:
    """A copy in another dtype or on another device; a copy to another device drops unused entries.

    Called for a CPU tensor too if the target is this device.
    """
    device = self.device if device is None else device
    values = _values(self).to(dtype=dtype or self.dtype, copy=True)
    if device.type == DEVICE_TYPE:
        return _make(_indices(self).to(device, copy=True), values.to(device), self.shape, self.is_coalesced())
    indices, values = _indices(self).cpu(), values.cpu()
    used = indices[0] < self.shape[0]
    made = torch.sparse_coo_tensor(
        *(indices[:, used], values[used], self.shape), is_coalesced=self.is_coalesced(), check_invariants=False
    )
    return made.to(device)


def copy_(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Between sparse tensors, of which one may be on the CPU."""
    if not (self.is_sparse and source.is_sparse):
        raise RuntimeError(
            "copy_() between dense and sparse Tensors is not implemented! Use to_dense() on the sparse one first"
        )
    if self.device.type != DEVICE_TYPE:
        return self.copy_(source.to(self.device))
    return _copy_sparse(self, source, non_blocking)


def embedding_backward(
    grad: torch.Tensor, indices: torch.Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> torch.Tensor:
    """Sparse gradient (num_weights, features) of an embedding: one entry for each row that was read."""
    if scale_grad_by_freq:
        raise RuntimeError("embedding_backward: scale_grad_by_freq not supported with sparse gradients")
    positions, entries = indices.reshape(1, -1).to(torch.int64), grad.reshape(-1, grad.shape[-1])
    if padding_idx != -1:
        dropped = positions == padding_idx
        positions = positions.masked_fill(dropped, num_weights)
        entries = entries.masked_fill(dropped.reshape(-1, 1), 0)
    return _make(positions, entries, (num_weights, grad.shape[-1]), False)


def embedding_bag_backward(
    grad: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    bag: torch.Tensor,
    size: torch.Tensor,
    max_indices: torch.Tensor,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    *scales: Any,
) -> torch.Tensor:
    """Gradient (num_weights, features) of a table whose rows were added, averaged or compared in bags.

    `scales` are torch's last arguments: per_sample_weights and padding_idx.
    """
    rest = num_weights, scale_grad_by_freq, mode, *scales
    if sparse:
        return aten._embedding_bag_sparse_backward(grad, indices, offsets, bag, size, *rest)  # type: ignore[no-any-return]
    return aten._embedding_bag_dense_backward(grad, indices, bag, size, max_indices, *rest)  # type: ignore[no-any-return]


def missing(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """An operation that has no kernel for sparse tensors of the device."""
    raise _unsupported(str(operator).removesuffix(".default"))


def _unsupported(what: str) -> MissingLoweringError:
    return MissingLoweringError(
        f"{what} is not among the operations of sparse tensors on the lazy XLA device, which are those that gradients "
        "of embeddings, torch.optim.SGD, Adagrad and SparseAdam need. Use tensor.to_dense() or tensor.cpu() first, or "
        "torch.nn.Embedding(..., sparse=False), whose gradient is dense"
    )


KERNELS: dict[str, Callable[..., Any]] = {
    "_embedding_bag_backward": embedding_bag_backward,
    "embedding_sparse_backward": embedding_backward,
}
"""ATen name -> kernel on dense tensors of the device."""

SPARSE_KERNELS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {name: operators.on_key(name, "SparseCPU") for name in FROM_TORCH}
    | {f"{name}.{kind}": _scaled(name) for name in ("div", "div_", "mul", "mul_") for kind in ("Scalar", "Tensor")}
    | {
        "_coalesce": coalesce,
        "_to_copy": to_copy,
        "_to_dense": to_dense,
        "add.Tensor": add,
        "add_.Tensor": add_,
        "copy_": copy_,
        "neg": lambda self: _like(self, -_values(self)),
        "sparse_mask": sparse_mask,
    }
)
"""ATen name -> kernel on sparse ones."""
