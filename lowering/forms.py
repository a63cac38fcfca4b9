"""Forms of an operation: ways to compute the same values, one object each, and the choice among them.

An operation with several forms has a table of them in order of preference; the first without an objection computes the
call.  `chosen` says which that was, and what each form before it objected to.

A kernel of a library that was compiled for an absent GPU may still fail on a real one: an old driver, a library without
a plan for the shape.  When a compiler fails, call `refuse` with its error; if it names a kernel, build the program
again, without that kernel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Generic, Protocol, TypeVar


class Call(Protocol):
    """One call of an operation, with what is known of the machine that it is for."""

    @property
    def platform(self) -> str:
        """``"cpu"``, ``"gpu"`` or ``"tpu"``."""

    @property
    def summary(self) -> str:
        """Sizes and dtype, for people."""


CallT = TypeVar("CallT", bound=Call)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form(Generic[CallT]):
    """One way to compute an operation; a family adds its passes as fields."""

    name: str
    why: str
    """Why it comes before the forms after it."""
    platforms: tuple[str, ...] = ("cpu", "gpu", "tpu")
    supports: Callable[[CallT], str | None] = lambda call: None
    """Why it cannot compute a call on one of its platforms, or would be slower; None if it can."""
    marks: tuple[str, ...] = ()
    """Words, in lower case, by one of which a compiler's error names its kernel."""

    def objection(self, call: CallT) -> str | None:
        """Why it does not compute `call`; None if it does."""
        if call.platform not in self.platforms:
            return f"for {' and '.join(self.platforms)}"
        if self.name in refused:
            return f"refused: {_first_line(refused[self.name])}"
        return self.supports(call)


AnyForm = TypeVar("AnyForm", bound=Form)  # type: ignore[type-arg]  # a form of any operation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """Which form computes a call."""

    operation: str
    call: str
    """Sizes and dtype."""
    platform: str
    form: str
    why: str
    left_out: Mapping[str, str]
    """Form that comes before it -> why not."""


_KEPT: Final = 256
_chosen: dict[tuple[str, str, str], Choice] = {}
refused: dict[str, str] = {}
"""Kernel or form -> the error; it is left out for the rest of the process.  Your own is one more, with your reason."""
_traced: dict[str, tuple[str, ...]] = {}
"""Kernel in a program of this process -> its marks."""


def choose(operation: str, forms: Sequence[AnyForm], call: CallT) -> AnyForm:
    """The first of `forms` without an objection to `call`; the last one never has any."""
    left_out: dict[str, str] = {}
    for form in forms:
        objection = form.objection(call)
        if objection is None:
            break
        left_out[form.name] = objection
    if form.marks:
        _traced[form.name] = form.marks
    key = operation, call.summary, call.platform
    _chosen.pop(key, None)
    _chosen[key] = Choice(
        operation=operation,
        call=call.summary,
        platform=call.platform,
        form=form.name,
        why=form.why,
        left_out=MappingProxyType(left_out),
    )
    if len(_chosen) > _KEPT:
        del _chosen[next(iter(_chosen))]
    return form


def chosen(operation: str | None = None) -> tuple[Choice, ...]:
    """The newest choice for each kind of call in the programs that this process has built, the latest last.

    Args:
        operation: only those of this operation; None for all.  256 are kept.
    """
    return tuple(choice for choice in _chosen.values() if operation in (None, choice.operation))


def refuse(error: str) -> str:
    """Leaves out the kernels in use that a compiler's `error` names; a sentence for the user, "" if it names none."""
    text = error.lower()
    names = [name for name, marks in sorted(_traced.items()) if any(word in text for word in marks)]
    for name in names:
        del _traced[name]
    refused.update(dict.fromkeys(names, error))
    if not names:
        return ""
    return (
        f"the kernel {' and '.join(map(repr, names))} was refused ({_first_line(error)}); another "
        "form computes its calls from now on, with more memory. xla_amp.lowering.forms.refused has the whole error"
    )


def _first_line(error: str) -> str:
    return f"{error.strip().partition(chr(10))[0]:.300}"
