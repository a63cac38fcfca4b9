"""Attributes of other packages that an integration replaces: rows with a reason, installed in one place."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Patch:
    """One attribute of a framework that is replaced.

    It does what the framework does unless the device is the XLA device.
    """

    module: str
    owner: str
    """Class in the module; empty for an attribute of the module."""
    name: str
    replace: Callable[..., Any]
    """The new attribute, called with the old one and the arguments; of a list, the new list."""
    reason: str
    """What the framework does, and what breaks without the patch."""

    def replacement(self, original: Any) -> Any:
        """The new attribute, of the kind of the old one."""
        if isinstance(original, list):
            return self.replace(original)
        if isinstance(original, property):
            return property(functools.partial(self.replace, original.fget), doc=original.__doc__)
        if isinstance(original, functools.cached_property):
            made = functools.cached_property(functools.partial(self.replace, original.func))
            made.__set_name__(object, self.name)
            return made

        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return self.replace(original, *args, **kwargs)

        return replaced


def install(patches: Iterable[Patch], installed: dict[Patch, Any]) -> None:
    """Replaces what exists by now and is not `installed`, which gets the old attributes."""
    for patch in patches:
        owner: Any = sys.modules.get(patch.module)
        if owner is not None and patch.owner:
            owner = owner.__dict__.get(patch.owner)
        if owner is None or patch in installed or patch.name not in owner.__dict__:
            continue
        installed[patch] = inspect.getattr_static(owner, patch.name)
        setattr(owner, patch.name, patch.replacement(installed[patch]))
