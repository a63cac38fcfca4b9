"""Pad tensors to a few sizes, so that data of many sizes needs few compiled programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from xla_amp.common import arguments

SHORTEST = 16
"""The smallest of `bucket_sizes`, followed by its double."""


def bucket_sizes(longest: int) -> tuple[int, ...]:
    """16, 32, and from there powers of two and one and a half times these, up to `longest`, which is the last.

    At most a third of a padded extent above 32 is padding.

    Raises:
        ValueError: `longest` is not a positive integer.

    Example:
        >>> bucket_sizes(200)
        (16, 32, 48, 64, 96, 128, 192, 200)
    """
    if isinstance(longest, bool) or not isinstance(longest, int) or longest < 1:
        raise ValueError(f"bucket_sizes({longest!r}): expected the longest extent of the data, 1 or more")
    sizes, size = [SHORTEST], 2 * SHORTEST
    while size < longest:
        sizes += [size, size * 3 // 2]
        size *= 2
    return (*(size for size in sizes if size < longest), longest)


def pad_to_bucket(tensor: torch.Tensor, sizes: int | Sequence[int], dim: int = -1, value: float = 0.0) -> torch.Tensor:
    """`tensor` padded with `value` at the end of `dim`, to the smallest of `sizes` that it fits in.

    Every shape is a separate program.  Pad batches on the CPU, before they go to the device: there the padding itself
    would be a program for each size.  The model must ignore the padding: labels padded with ``ignore_index`` do not
    change a loss, attention needs a mask.

    Args:
        tensor: of any dtype.
        sizes: extents to pad to, in any order; or the largest, for 16, 32, 48, 64, 96, ... up to it.
        dim: the dimension to pad.
        value: the padding, converted to the dtype of `tensor`.

    Returns:
        The padded tensor, or `tensor` itself if it has one of the sizes.

    Raises:
        ValueError: `tensor` is longer than all of `sizes`, or has no such dimension.

    Example:
        >>> pad_to_bucket(torch.tensor([[7, 8, 9]]), (2, 4, 8), value=-100)
        tensor([[   7,    8,    9, -100]])
    """
    arguments.require("pad_to_bucket(tensor)", tensor, torch.Tensor, "a tensor")
    arguments.require("pad_to_bucket(dim=...)", dim, int, "the number of a dimension")
    arguments.require("pad_to_bucket(value=...)", value, (int, float, bool), "a number")
    _check_sizes(sizes)
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"pad_to_bucket(dim={dim}): the tensor of shape {list(tensor.shape)} has no such dimension")
    sizes = bucket_sizes(sizes) if isinstance(sizes, int) else sizes
    extent = tensor.shape[dim]
    room = min((size for size in sizes if size >= extent), default=None)
    if room is None:
        raise ValueError(
            f"pad_to_bucket(sizes={tuple(sizes)}): an extent of {extent} (shape {list(tensor.shape)}, dim {dim}) fits "
            "in none of them; add a larger size, or cut the data"
        )
    if room == extent:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = room - extent
    return torch.cat([tensor, tensor.new_full(shape, value)], dim)


def _check_sizes(sizes: object) -> None:
    expected = "the longest extent, as 512, or the extents, as (128, 512)"
    arguments.require("pad_to_bucket(sizes=...)", sizes, (int, Sequence), expected)
    for size in sizes if isinstance(sizes, Sequence) else ():
        arguments.require(f"pad_to_bucket(sizes={sizes!r})", size, int, expected)


def pad_batch(batch: Any, sizes: int | Sequence[int], padding: Mapping[Any, float], dim: int = 1) -> Any:
    """`batch` with the tensors that `padding` names padded by `pad_to_bucket`; for a ``collate_fn`` of yours.

    Args:
        batch: a dict, tuple or list of tensors on the CPU.  It is not changed.
        sizes: extents to pad to, or the largest, as for `pad_to_bucket`.
        padding: key of a dict, or index of a tuple or list -> what its tensor is padded with.
        dim: the dimension to pad, 1 where 0 counts the examples.

    Returns:
        A batch of the same kind: dicts and lists, named tuples and classes that derive from a dict, too.

    Raises:
        ValueError: `batch` has not the entries that `padding` names, or one fits in no size.

    Example:
        >>> pad_batch({"ids": torch.tensor([[7, 8, 9]]), "kind": 3}, (2, 4, 8), {"ids": 0})
        {'ids': tensor([[7, 8, 9, 0]]), 'kind': 3}
    """
    named = isinstance(batch, Mapping)
    arguments.require("pad_batch(padding=...)", padding, Mapping, 'values by name such as {"input_ids": 0}')
    if not named and not isinstance(batch, list | tuple):
        raise ValueError(f"pad_batch(): expected a dict, tuple or list of tensors, got {type(batch).__name__}")
    names = list(batch) if named else list(range(len(batch)))
    for name in padding:
        if name not in names or not isinstance(batch[name], torch.Tensor):
            raise ValueError(f"pad_batch(padding={dict(padding)!r}): the batch has no tensor {name!r}, only {names}")
    padded = {name: pad_to_bucket(batch[name], sizes, dim, value) for name, value in padding.items()}
    values = [padded.get(name, batch[name]) for name in names]
    if named:
        return type(batch)(dict(zip(names, values, strict=True)))
    return batch._make(values) if hasattr(batch, "_make") else type(batch)(values)
