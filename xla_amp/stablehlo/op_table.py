"""Classify each StableHLO operation: its row in ``operations.toml``, overridden by the policy's rule.

The classes are the lists of TensorFlow's grappler (auto_mixed_precision.cc), which calls them colours: allow, infer,
clear and deny.
"""

from __future__ import annotations

import functools
import importlib.resources
import tomllib
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from xla_amp.common.types import Cast
from xla_amp.errors import PolicyError
from xla_amp.policy.cast_dtypes import cast_dtypes
from xla_amp.policy.op_catalog import WHILE_LOOP, meanings, same_as
from xla_amp.policy.policy import Decision, Match, Policy
from xla_amp.stablehlo import constants, ir, locations, sizes
from xla_amp.stablehlo.composite_marks import CompositeMark, mark_of
from xla_amp.stablehlo.scope_paths import ModulePaths

Colour: TypeAlias = Literal["allow", "widest", "infer", "clear", "deny"]
"""``allow``  runs in the low dtype
``widest`` runs in the widest dtype of its operands, numbers excluded: a rule of the user says promote or keep; or its
           first operand gives the dtype of its result (`OpClass.inside`)
``infer``  follows its neighbours
``clear``  does not round, so either dtype gives the same values
``deny``   stays float32"""

Structure: TypeAlias = Literal[
    "op", "contraction", "body", "identity", "loop", "branch", "inline", "call", "cast", "constant", "opaque"
]
"""How operands, regions and results correspond; see ``operations.toml``."""

_TABLE: Final = "operations.toml"
_DIALECT: Final = "stablehlo."


class OperationRow(NamedTuple):
    """One operation in the table."""

    colour: Colour | Literal["fixed"]
    """``fixed`` is deny that no rule of the policy changes."""
    why: str
    structure: Structure = "op"
    upstream: bool = True
    builtin: bool = True
    """Whether the built-in rules of a policy decide it, too."""
    exact: bool = False
    """Whether it tells apart what a low dtype makes equal."""
    adds: bool = False
    """Whether it adds two values."""
    moves: bool = False
    """Whether its result has the elements of its one operand."""
    scales: bool = False
    """Whether it multiplies with a power of two."""


class OpClass(NamedTuple):
    """The class of one kind of operation under one policy."""

    name: str
    """Name in the table, ``reduce.add``."""
    colour: Colour
    structure: Structure
    upstream: bool
    """Whether a cast of its result may be moved to its operands."""
    why: str
    decision: Decision | None
    """The policy's decision about the corresponding ATen operation, if there is one."""
    reached: frozenset[Match]
    """The user's rules that reach it."""
    fixed: bool
    """Whether its row lets no rule make it low."""
    row: OperationRow
    """Its row in the table."""

    @property
    def exact(self) -> bool:
        """Whether it tells apart what a low dtype makes equal."""
        return self.row.exact

    @property
    def inside(self) -> bool:
        """Whether it computes in float32, and its first result has the dtype of its first operand."""
        return self.decision is not None and self.decision.cast == "fp32_inside"

    @property
    def sums_few(self) -> bool:
        """Whether it is a contraction that no rule decides, because a low dtype gains nothing."""
        return self.structure == "contraction" and self.decision is None

    @property
    def wide_result(self) -> bool:
        """Whether it gives the float32 sums of its low operands."""
        return self.decision is not None and self.decision.cast == "low_fp32_out" and not self.fixed


class OperationTable(NamedTuple):
    """The parsed ``operations.toml``."""

    rows: Mapping[str, OperationRow]
    unknown: OperationRow
    narrowed: Mapping[str, str]
    """Operation -> what its class also depends on: body, request, source, square or target."""


@functools.cache
def table() -> OperationTable:
    """The shipped table, checked.

    Raises:
        PolicyError: an operation has two rows, or a colour or structure is unknown.
    """
    text = importlib.resources.files(__package__).joinpath(_TABLE).read_text(encoding="utf-8")
    data: dict[str, Any] = tomllib.loads(text)
    rows: dict[str, OperationRow] = {}
    for entry in data["row"]:
        row = _row(entry)
        for name in entry["operations"]:
            if name in rows:
                raise PolicyError(f"{_TABLE}: {name!r} has two rows")
            rows[name] = row
    narrowed = {name: by for by, names in data["narrowed"].items() for name in names}
    return OperationTable(rows, _row(data["unknown"]), narrowed)


def _row(entry: Mapping[str, Any]) -> OperationRow:
    row = OperationRow(**{name: value for name, value in entry.items() if name != "operations"})
    if row.structure not in get_args(Structure) or row.colour not in (*get_args(Colour), "fixed"):
        raise PolicyError(f"{_TABLE}: unknown colour {row.colour!r} or structure {row.structure!r}")
    return row


class Classifier:
    """Classes of operations under one policy, cached by name and module path."""

    def __init__(self, policy: Policy, paths: ModulePaths) -> None:
        self.policy = policy
        self.paths = paths
        self.composites = False
        """Whether operations are marked as parts of others (`composite_marks`)."""
        self._cache: dict[tuple[str, str | None], OpClass] = {}
        self._marked: dict[tuple[CompositeMark, str], OpClass] = {}

    def classify(self, operation: Any) -> OpClass:
        """The class of `operation`; `PolicyError` if the policy bans it."""
        marked = mark_of(operation) if self.composites else None
        if marked is not None:
            found = self._marked.get((marked, operation.name))
            if found is None:
                found = self._marked[marked, operation.name] = self._composite(marked, operation)
            return found
        name = table_name(operation)
        module_path = self.paths.of(operation) if self.policy.by_module else None
        found = self._cache.get((name, module_path))
        if found is None:
            found = self._cache[name, module_path] = self._decide(name, module_path)
        return found

    def _composite(self, marked: CompositeMark, operation: Any) -> OpClass:
        """The class of a part of another operation, or of one of its edges."""
        same = same_as(marked.operation)[1:]
        decision = self.policy.decision(marked.operation, marked.path, same)
        reached = self.policy.reaching(marked.operation, marked.path, same)
        shown = marked.operation.partition(".")[0]
        if decision.cast == "ban":
            raise PolicyError(f"{shown}: the policy {self.policy.name!r} bans it: {decision.why}")
        known = table().rows.get(table_name(operation)) or table().rows.get(_base(table_name(operation)))
        row = known or table().unknown
        if marked.is_edge:
            return OpClass(shown, _colour(decision, "deny"), "op", False, decision.why, decision, reached, False, row)
        structure = known.structure if known else "op"
        name, why = operation.name.removeprefix(_DIALECT), f"a part of {shown}, which computes in float32"
        return OpClass(name, "deny", structure, False, why, None, frozenset(), True, row)

    def _decide(self, name: str, module_path: str | None) -> OpClass:
        row, aten = _entry(name)
        decision = self.policy.decision(aten[0], module_path, aten[1:]) if aten else None
        reached = self.policy.reaching(aten[0], module_path, aten[1:]) if aten else frozenset[Match]()
        if row.structure == "loop":
            decision = self.policy.decision(WHILE_LOOP, module_path)
            reached = self.policy.reaching(WHILE_LOOP, module_path)
        if not row.builtin and decision is not None and not decision.from_user:
            decision = None
        if decision is not None and row.colour == "infer" and row.structure == "op" and not row.scales:
            decision = decision.between_products()
        cast: Cast = decision.cast if decision else "keep"
        colour: Colour = "deny" if row.colour == "fixed" else row.colour
        why = row.why
        if cast == "ban":
            raise PolicyError(f"{name}: the policy {self.policy.name!r} bans it: {decision.why if decision else ''}")
        fixed = row.colour == "fixed" and cast != "fp32_inside"
        if not fixed and decision is not None and row.structure != "loop" and (decision.rule or cast == "fp32"):
            colour = _colour(decision, colour)
            if colour != row.colour:
                why = decision.why
        narrowed = row.scales or (name not in table().rows and _base(name) in _PRODUCTS)
        shown = _base(name) if narrowed else name
        return OpClass(shown, colour, row.structure, row.upstream, why, decision, reached, fixed, row)


@functools.cache
def _entry(name: str) -> tuple[OperationRow, tuple[str, ...]]:
    """The row of a table name, and the ATen names that decide it."""
    row = table().rows.get(name) or table().rows.get(_base(name)) or table().unknown
    shorter = (name, name.rpartition(".")[0], _base(name))
    return row, next(filter(None, (meanings("stablehlo", each) for each in shorter)), ())


_PRODUCTS: Final = ("dot_general",)
"""Operations that `_request` narrows for the policy only: the table has one row, and reports show one name."""


def _colour(decision: Decision, default: Colour) -> Colour:
    """The colour of an operation by its rule; `default` where the rule leaves it the dtype of its operands."""
    if decision.cast == "fp32_inside":
        return "widest"
    found: set[str] = set()
    for given in _OPERANDS:
        used = cast_dtypes(decision.cast, given, "low", "float32", mixed=False, asks_result=False).operands
        found.update(dtype for dtype in used if dtype is not None)
    if len(found) == 1:
        return "allow" if found == {"low"} else "deny"
    # Moving and selecting round nothing, so a cast before or behind them gives the same values.
    return "widest" if decision.from_user and default != "clear" else default


_OPERANDS: Final = (("low",), ("float32",))
"""Operands to ask a cast about: if both give the same dtype, it does not depend on them."""


def _base(name: str) -> str:
    # The dot of "chlo.erf" belongs to the name; "reduce.add" narrows "reduce".
    for base in (name.partition(".")[0], name.rpartition(".")[0]):
        if base in table().narrowed:
            return base
    return name


def table_name(operation: Any) -> str:
    """Name of an operation in the table, with a suffix if its class depends on more than its name."""
    name: str = operation.name.removeprefix(_DIALECT)
    by = table().narrowed.get(name)
    if by is None:
        return name
    suffix = _NARROW[by](operation)
    return f"{name}.{suffix}" if suffix else name


def _body(operation: Any) -> str:
    # The last operation is the return; a body without others returns an argument.
    names = [view.operation.name.removeprefix(_DIALECT) for view in operation.regions[0].blocks[0].operations][:-1]
    if len(names) < 2:
        return names[0] if names else ""
    return "exact" if all(table().rows.get(name, table().unknown).colour == "clear" for name in names) else "other"


def _source(operation: Any) -> str:
    kind = ir.tensor_type(operation.operands[0].type)
    element = kind.element if kind else ""
    if element == "i1":
        return "bool"
    if _complex(operation):
        return "complex"
    made = ir.tensor_type(operation.results[0].type)
    if made and made.element.lstrip("u").startswith("i"):
        return "counted"
    return "integer" if element.lstrip("u").startswith("i") else "float"


def _complex(operation: Any) -> str:
    kind = ir.tensor_type(operation.operands[0].type)
    return "complex" if kind and kind.element.startswith("complex") else ""


def _request(operation: Any) -> str:
    attributes = operation.attributes
    if any(map(ir.is_quantized, operation.operands)):
        return "quantized"
    result = ir.tensor_type(operation.results[0].type)
    if "algorithm" in attributes or (result is not None and result.element not in _FLOATS):
        return "requested"
    asks = "precision_config" in attributes and "HIGH" in str(attributes["precision_config"])
    if asks and _LOWERINGS not in locations.of(operation).text:
        return "requested"
    found = sizes.contraction(operation)
    if found is None:
        return ""
    aten = found.aten if operation.name == "stablehlo.dot_general" else ""
    return ".".join(filter(None, (aten, "few"))) if found.sums_few and aten != "outer" else aten


def _factor(operation: Any) -> str:
    first, second = operation.operands
    multiplies = operation.name == "stablehlo.multiply"
    if multiplies and first == second:
        return "square"
    return "scaled" if _is_power_of_two(second) or (multiplies and _is_power_of_two(first)) else ""


def _is_power_of_two(value: Any) -> bool:
    while (name := getattr(value.owner, "name", "").removeprefix(_DIALECT)) in _SPREADS:
        value = value.owner.operands[0]
    if name != "constant" or ir.element(value) not in _FLOATS:
        return False
    attribute = value.owner.attributes["value"]
    values = None if constants.is_resource(attribute) else constants.array_of(attribute)
    return values is not None and values.size == 1 and abs(np.frexp(values[0])[0]) == 0.5


_SPREADS: Final = ("broadcast_in_dim", "convert", "reshape")

_FLOATS: Final = ("f32", "bf16", "f16")
"""Element types in which a contraction that the policy decides gives its result."""


_LOWERINGS: Final = "xla_amp/lowering/"
"""Part of the locations in programs exported from torch, whose products all have torch's default precision."""


_NARROW: Final[Mapping[str, Callable[[Any], str]]] = {
    "body": _body,
    "complex": _complex,
    "request": _request,
    "source": _source,
    "factor": _factor,
    "target": lambda operation: operation.attributes["call_target_name"].value,
}
