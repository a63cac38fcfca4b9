"""What a lowering's operator takes, returns and writes, by its schema in torch."""

from __future__ import annotations

import keyword
from typing import Any, Literal

from xla_amp.lowering import Lowering

Variant = Literal["functional", "inplace", "out"]
"""Variant of the operator: as registered, in-place (writes the first argument), or with ``out=`` arguments."""

DROPPED = frozenset(("Device", "Layout", "Generator", "MemoryFormat"))
_DROPPED_NAMES = frozenset(("pin_memory",))


class SchemaArgument:
    """One schema argument, its variable in the kernel and its kind."""

    def __init__(self, position: int, argument: Any, lowering: Lowering) -> None:
        self.name: str = argument.name
        self.keyword = bool(argument.kwarg_only)
        usable = self.keyword and not keyword.iskeyword(self.name)
        self.variable = self.name if usable else f"a{position}"
        self.is_out = bool(argument.is_out)
        self.has_default = argument.has_default_value()
        self.default = argument.default_value if self.has_default else None
        text = str(argument.real_type)
        base = text.removeprefix("Optional[").removesuffix("]") if text.startswith("Optional[") else text
        self.optional = base != text
        self.type = base
        self.kind = self._kind(base, lowering)

    def _kind(self, base: str, lowering: Lowering) -> str:
        if base in DROPPED or self.name in _DROPPED_NAMES:
            return "dropped"
        if base == "Tensor":
            return "tensor"
        if base in ("List[Tensor]", "List[Optional[Tensor]]"):
            return "tensors"
        if base == "number":
            return "constant" if self.name in lowering.static else "number"
        if base == "List[number]":
            return "numbers"
        if base == "float" and self.name in lowering.lifted:
            return "number"
        if base == "ScalarType":
            return "dtype"
        return "list" if base.startswith("List[") else "constant"


class Operation:
    """A lowering bound to one torch operator."""

    def __init__(self, lowering: Lowering, operator: Any, variant: Variant) -> None:
        self.lowering = lowering
        self.operator = operator
        self.variant = variant
        self.name = str(operator).removeprefix("aten.").removesuffix(".default")
        schema = operator._schema
        self.arguments = [SchemaArgument(i, argument, lowering) for i, argument in enumerate(schema.arguments)]
        self.inputs = [argument for argument in self.arguments if not argument.is_out]
        self.returns = list(schema.returns)
        self.mutated = tuple(
            argument for name in lowering.mutates for argument in self.arguments if argument.name == name
        )
        if variant == "inplace":
            self.mutated = (self.arguments[0],)
