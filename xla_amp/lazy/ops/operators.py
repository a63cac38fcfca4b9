"""Find operators of torch by name and by variant, and collect kernels for them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Kernel = Callable[..., Any]
Wrapper = Callable[[Kernel], Kernel]
_Kernel = TypeVar("_Kernel", bound=Kernel)


class KernelTable(dict[str, Kernel]):
    """ATen name -> kernel."""

    def implements(self, *names: str) -> Callable[[_Kernel], _Kernel]:
        """A decorator that adds the kernel of `names`."""

        def decorate(function: _Kernel) -> _Kernel:
            self.update(dict.fromkeys(names, function))
            return function

        return decorate


def before(action: Callable[..., None]) -> Wrapper:
    """A wrapper of kernels: calls `action` with the arguments, then the kernel."""

    def around(kernel: Kernel) -> Kernel:
        def wrapped(*args: Any, **options: Any) -> Any:
            action(*args, **options)
            return kernel(*args, **options)

        return wrapped

    return around


def find(name: str) -> Any | None:
    """The operator of a name such as ``add.Tensor`` or ``torchvision::nms``; None if this torch lacks it."""
    library, _, name = name.rpartition("::")
    base, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, library or "aten"), base, None), overload or "default", None)


def on_key(name: str, dispatch_key: str) -> Callable[..., Any]:
    """The kernel that torch has for an operator on another dispatch key."""
    keys = torch.DispatchKeySet(getattr(torch.DispatchKey, dispatch_key))
    return functools.partial(torch.library.get_kernel(find(name), dispatch_key).call_boxed, keys)  # type: ignore[arg-type]


def functional_arguments(operator: Any) -> list[tuple[str, str]]:
    """(name, type) of the operator's arguments without its ``out=`` ones."""
    return [(argument.name, str(argument.type)) for argument in operator._schema.arguments if not argument.is_out]


@functools.cache
def functional_variant(operator: Any) -> Any:
    """The overload of the same arguments that writes none of them; the operator itself if there is none."""
    if not operator._schema.is_mutable:
        return operator
    library, _, name = operator._schema.name.partition("::")
    wanted = functional_arguments(operator)
    for base in (name, name.removesuffix("_")):
        packet = getattr(getattr(torch.ops, library), base, None)
        for overload in packet.overloads() if packet is not None else ():
            candidate = getattr(packet, overload)
            if not candidate._schema.is_mutable and functional_arguments(candidate) == wanted:
                return candidate
    return operator
