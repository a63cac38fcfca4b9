"""How one operation is treated: its row in ``operations.toml`` and what the policy says about it."""

from __future__ import annotations

import functools
import importlib.resources
import re
import tomllib
from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

from xla_amp.errors import PolicyError
from xla_amp.policy import equivalent
from xla_amp.policy.policy import Decision, Policy
from xla_amp.stablehlo import ir
from xla_amp.types import Cast

Colour: TypeAlias = Literal["allow", "infer", "clear", "deny"]
"""Grappler's four lists: what runs low, what follows, what does not care, what must not."""

Structure: TypeAlias = Literal[
    "op", "contraction", "body", "lanes", "loop", "branch", "inline", "call", "cast", "constant", "sealed"
]
"""How operands, regions and results hang together; see ``operations.toml``."""

_TABLE: Final = "operations.toml"
_DIALECT: Final = "stablehlo."
_WIDE: Final[frozenset[Cast]] = frozenset({"fp32", "fp32_out", "fp32_append"})


class Row(NamedTuple):
    """One operation in the table."""

    colour: str
    """A `Colour`, or ``fixed``: deny whatever the policy says."""
    structure: Structure
    upstream: bool
    why: str


class Treatment(NamedTuple):
    """What is done with one kind of operation under one policy."""

    name: str
    """Name in the table, ``reduce.add``."""
    colour: Colour
    structure: Structure
    upstream: bool
    """Whether a cast behind it may be moved before it."""
    why: str
    decision: Decision | None
    """The policy's, where a rule of the vocabulary corresponds."""


class Table(NamedTuple):
    """``operations.toml``, read."""

    rows: Mapping[str, Row]
    unknown: Row
    narrowed: Mapping[str, str]
    """Operation -> what its treatment also depends on: body, source or target."""


@functools.cache
def table() -> Table:
    """The shipped table, checked.

    Raises:
        PolicyError: an operation is written twice, or a colour or structure is unknown.
    """
    text = importlib.resources.files(__package__).joinpath(_TABLE).read_text(encoding="utf-8")
    data: dict[str, Any] = tomllib.loads(text)
    rows: dict[str, Row] = {}
    for entry in data["row"]:
        row = _row(entry)
        for name in entry["operations"]:
            if name in rows:
                raise PolicyError(f"{_TABLE}: {name!r} is written twice")
            rows[name] = row
    narrowed = {name: by for by, names in data["narrowed"].items() for name in names}
    return Table(rows, _row(data["unknown"]), narrowed)


def _row(entry: Mapping[str, Any]) -> Row:
    structure = entry.get("structure", "op")
    if structure not in get_args(Structure) or entry["colour"] not in (*get_args(Colour), "fixed"):
        raise PolicyError(f"{_TABLE}: a row says colour {entry['colour']!r} and structure {structure!r}")
    return Row(entry["colour"], structure, entry.get("upstream", True), entry["why"])


class Treatments:
    """Treatments under one policy, kept by name and place."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._kept: dict[tuple[str, str | None], Treatment] = {}

    def of(self, operation: Any) -> Treatment:
        """How `operation` is treated."""
        name = table_name(operation)
        place = _place(operation) if self.policy.by_module else None
        found = self._kept.get((name, place))
        if found is None:
            found = self._kept[name, place] = self._decide(name, place)
        return found

    def _decide(self, name: str, place: str | None) -> Treatment:
        row = table().rows.get(name) or table().rows.get(_base(name)) or table().unknown
        aten = equivalent("stablehlo", name) or equivalent("stablehlo", _base(name))
        decision = self.policy.decide(aten, place) if aten else None
        cast: Cast = decision.cast if decision else "keep"
        colour, why = row.colour, row.why
        if cast == "ban":
            raise PolicyError(f"{name}: the policy {self.policy.name!r} bans it: {decision.why if decision else ''}")
        if row.colour == "fixed":
            colour = "deny"
        elif cast == "low":
            colour = "allow"
        elif cast in _WIDE:
            colour = "deny"
        if decision and colour != row.colour and row.colour != "fixed":
            why = decision.why
        return Treatment(name, colour, row.structure, row.upstream, why, decision)  # type: ignore[arg-type]


def _base(name: str) -> str:
    # "chlo.erf" is a name of its own; "reduce.add" narrows "reduce".
    base = name.partition(".")[0]
    return base if base in table().narrowed else name


def table_name(operation: Any) -> str:
    """Name of an operation in the table, narrowed where its treatment depends on more than its name."""
    name: str = operation.name.removeprefix(_DIALECT)
    by = table().narrowed.get(name)
    if by is None:
        return name
    suffix = _NARROW[by](operation)
    return f"{name}.{suffix}" if suffix else name


def _body(operation: Any) -> str:
    # The body ends in a return; a body of nothing else gives back an argument.
    names = [view.operation.name.removeprefix(_DIALECT) for view in operation.regions[0].blocks[0].operations][:-1]
    if len(names) < 2:
        return names[0] if names else ""
    return "exact" if all(table().rows.get(name, table().unknown).colour == "clear" for name in names) else "other"


def _source(operation: Any) -> str:
    kind = ir.tensor_type(operation.operands[0].type)
    element = kind.element if kind else ""
    if element == "i1":
        return "bool"
    if element.startswith("complex"):
        return "complex"
    return "integer" if element.lstrip("u").startswith("i") else "float"


def _target(operation: Any) -> str:
    target: str = operation.attributes["call_target_name"].value
    return target


_NARROW: Final = {"body": _body, "source": _source, "target": _target}

_WRAPPED: Final = re.compile(r"^[a-z_]+\((.*)\)$")


def _place(operation: Any) -> str | None:
    """The name scope that JAX wrote into the location, as a module path: ``encoder.layer_0`` of
    ``jit(step)/jvp(encoder)/layer_0/dot_general``; None where there is none."""
    name = getattr(operation.location, "name_str", None)
    if name is None:
        return None
    parts = []
    for part in name.split("/")[:-1]:
        function = part.startswith(("jit(", "pjit("))
        while match := _WRAPPED.match(part):
            part = match.group(1)
        if part and not function:
            parts.append(part)
    return ".".join(parts)
