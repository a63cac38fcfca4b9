"""The value behind one torch storage, and who may use its array."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import jax
    import torch

    from xla_amp.lazy.graph.trace import Spec


class Owner(Protocol):
    """Keeps the arrays of buffers between two steps (`xla_amp.lazy.capture.replay`)."""

    def release(self) -> None:
        """Returns every array to its buffer (`Buffer.clear_owner`); takes the trace's lock."""


class Owned:
    """Stored in a buffer instead of an array that `owner` has."""

    __slots__ = ("owner",)

    def __init__(self, owner: Owner) -> None:
        self.owner = owner


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
        """A `jax.Array`, `Poisoned`, or None for memory that was never written.

        If another object owns the array, reading or setting it here first makes the owner release it.
        """
        array = self._array
        while type(array) is Owned:
            array.owner.release()
            array = self._array
        return array

    @array.setter
    def array(self, value: jax.Array | Poisoned | None) -> None:
        if type(self._array) is Owned:
            self._array.owner.release()
        self.clear_owner(value)

    @property
    def owner(self) -> Owner | None:
        """The object that has the array now, None for the buffer itself."""
        array = self._array
        return array.owner if type(array) is Owned else None

    def set_owner(self, owner: Owner) -> None:
        """Makes `owner`, which has read the array, its owner."""
        self._array = Owned(owner)

    def clear_owner(self, array: jax.Array | Poisoned | None) -> None:
        """Stores `array`, and makes the buffer its owner."""
        self._array = array
        if self.external is not array:
            self.external = None
