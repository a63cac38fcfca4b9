"""The value behind one torch storage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax
    import torch

    from xla_amp.lazy.graph.trace import Spec


class Poisoned:
    """Stored in a buffer instead of a value that a failed step should have computed."""

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason


class Buffer:
    """The value behind one storage.

    While `number` is not negative, the value is computed by the trace.  Otherwise `array` is the value.
    """

    __slots__ = ("__weakref__", "_array", "address", "external", "number", "raw", "spec")

    def __init__(self, spec: Spec, number: int = -1, array: jax.Array | None = None) -> None:
        self.spec = spec
        self.external: jax.Array | None = None
        """`array` again, if JAX code may hold it too: this second reference prevents its donation to a program."""
        self.number = number
        """Number of the value in the trace, or -1."""
        self._array: Any = array
        self.address = 0
        """What the storage's ``data_ptr()`` returns, or 0 while nothing has asked (`tensors.storages`)."""
        self.raw: torch.Tensor | None = None
        """Bytes on the host, from a checkpoint: they are uploaded with the dtype of the first tensor set on them."""

    @property
    def array(self) -> Any:
        """A `jax.Array`, `Poisoned`, or None for memory that was never written."""
        return self._array

    @array.setter
    def array(self, value: jax.Array | Poisoned | None) -> None:
        self._array = value
        if self.external is not value:
            self.external = None
