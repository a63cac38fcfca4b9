"""Public names: those that load without PyTorch, and the error for a name that is not there or has left."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final


def importable(public: Iterable[str], needs_torch: Iterable[str]) -> list[str]:
    """The public names of a package that can be loaded here: without PyTorch not those that need it.

    So ``from xla_amp import *``, ``help`` and `inspect.getmembers` work in an environment for JAX.  Asked for by name,
    each says what to install.
    """
    try:
        without = importlib.util.find_spec("torch") is None
    except ImportError:
        without = True
    left_out = frozenset(needs_torch) if without else frozenset()
    return [name for name in public if name not in left_out]


def missing(package: str, name: str, public: Iterable[str]) -> AttributeError:
    """The error for a name that a package (its full name) does not have; `public` are the names that it has."""
    said = has_left(f"{package}.{name}")
    return said or AttributeError(f"module {package!r} has no attribute {name!r}; public names: {', '.join(public)}")


def load(package: str, name: str, modules: Mapping[str, str], public: Iterable[str]) -> object:
    """A public name of a package when it is first used, which the package keeps from then on; as for `missing`.

    `modules`: public name -> module that defines it, or that it is.
    """
    if name not in modules:
        raise missing(package, name, public)
    module = importlib.import_module(modules[name])
    value: object = module if module.__name__ == f"{package}.{name}" else getattr(module, name)
    vars(sys.modules[package])[name] = value
    return value


def has_left(name: str) -> AttributeError | None:
    """The error for a public name of `LEFT`; None for another."""
    return AttributeError(f"{name} has left: {LEFT[name]}") if name in LEFT else None


class Left:
    """Base of public classes: a name of `LEFT` that has left them raises its sentence."""

    __slots__ = ()

    if not TYPE_CHECKING:  # hidden from type checkers, which would otherwise accept any name

        def __getattr__(self, name: str) -> object:
            found = (has_left(f"{each.__name__}.{name}") for each in type(self).__mro__)
            plain = AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            raise next(filter(None, found), plain)


_TEXT: Final = "print(report), or leave it as the last line of a notebook's cell"
LEFT: Final[Mapping[str, str]] = MappingProxyType(
    {
        "ConversionReport.summary": "read report.rows(), report.casts and report.folded, or print(report)",
        "ConversionReport.to_html": _TEXT,
        "ConversionReport.to_json": "json.dumps(report.rows())",
        "ExplainReport.forms": "xla_amp.lowering.forms.chosen()",
        "ExplainReport.summary": "report.rows() has every decision; print(report) sums them up",
        "ExplainReport.to_json": "json.dumps(report.rows())",
        "GradScaler.name_parameters": "xla_amp.find_overflow(step) names the operation that made a gradient inf or NaN",
        "OverflowReport.to_json": "dataclasses.asdict(report)",
        "Report.to_html": _TEXT,
        "SkipLimitError.parameters": "xla_amp.find_overflow(step) names the operation behind the gradients",
        "xla_amp.checkpoint.Saving": "save_async returns a concurrent.futures.Future, whose result() waits",
        "xla_amp.jax.from_torch": "tensor.to(device), or xla_amp.jax.from_jax(jax.dlpack.from_dlpack(tensor))",
        "xla_amp.policy.extend_known_operations": "xla_amp.policy.op_catalog.registered_operations.subscribe(function)",
    }
)
"""Public names that left with 0.4.0 -> what to write; 0.5.0 empties it."""
