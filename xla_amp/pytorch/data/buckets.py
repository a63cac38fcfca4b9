"""Pad tensors to a few sizes, so that data of many sizes needs few compiled programs."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def pad_to_bucket(tensor: torch.Tensor, sizes: Sequence[int], dim: int = -1, value: float = 0.0) -> torch.Tensor:
    """`tensor` padded with `value` at the end of `dim`, to the smallest of `sizes` that it fits in.

    Every shape is a separate program.  Pad batches on the CPU, before they go to the device: there the padding itself
    would be a program for each size.  The model must ignore the padding: labels padded with ``ignore_index`` do not
    change a loss, attention needs a mask.

    Args:
        tensor: of any dtype.
        sizes: extents to pad to, in any order.
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
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"pad_to_bucket(dim={dim}): the tensor of shape {list(tensor.shape)} has no such dimension")
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
