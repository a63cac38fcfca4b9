"""Rules, layers of rules, and the policy that decides casts from them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from xla_amp.common.types import Cast, Layer, LowDtype
from xla_amp.errors import PolicyError, UnsupportedDtypeError
from xla_amp.policy import module_patterns, op_catalog

MEASURED: Final = "precision search"
"""Source of a policy that was measured for one program, so that its rules without an effect are always reported."""

ENDS_BY_FLOATS: Final = (
    "it is in a loop that ends by a comparison of floats that it computes, which low products would not let converge; "
    f"the rule {op_catalog.WHILE_LOOP} = low lets them"
)
"""Why the operations of a loop stay float32."""
_NO_OPERATION: Final = op_catalog.NO_OPERATIONS
"""Names in rules that are no operations which a front sees: it asks for them itself."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """Operations that share a cast, and the reason.

    In a built-in table each name is one exact overload, as torch registers it.  In a user's rule a bare name reaches
    every overload of the packet; globs, ``class:<operation class>`` and ``module:<path>`` are allowed.
    """

    operations: tuple[str, ...]
    cast: Cast
    why: str
    source: str
    """Document, header or list that the rule comes from; for a user's rule, where it is written."""
    note: str = ""
    """Where documentation and registered kernel differ: what the documentation says and what the rule does."""
    origin: str = ""
    """File, line and row, variable, or call that holds the rule."""


def _rebuild(kind: type[Any], fields: dict[str, Any]) -> Any:
    return kind(**fields)


def _reduce(value: Any) -> tuple[Any, ...]:
    # String hashes differ between processes, and the caches belong to this process: pickle the given fields only.
    return _rebuild, (type(value), {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init})


class Decision(NamedTuple):
    """The cast of one operation, and the rule that won; no rule means ``keep``."""

    operation: str
    cast: Cast
    layer: Layer
    rule: Rule | None

    @property
    def why(self) -> str:
        """The rule's reason."""
        if self.rule is None and self.cast == "fp32":
            return op_catalog.catalogue().may_be_low_why
        return self.rule.why if self.rule else "no rule: it runs in the dtypes of its operands"

    @property
    def from_user(self) -> bool:
        """Whether a rule of the user's decides, in a file, the environment, an override or a context."""
        return self.rule is not None and self.layer != "builtin"

    @property
    def of_whole(self) -> bool:
        """Whether it decides an operation that a front sees in parts only as a whole.

        A rule of the user's does, and one for what happens inside; the built-in rules for the parts have the effect of
        the other built-in rules.
        """
        return self.from_user or self.cast == "fp32_inside"

    def between_products(self) -> Decision:
        """On JAX and StableHLO: what computes without a rule is float32, unless the catalogue lets it be low."""
        compares = op_catalog.operation_class(self.operation) == "comparison"
        ruled = self.rule is not None and (self.from_user or self.cast != "promote")
        if compares or ruled or self.operation in op_catalog.catalogue().may_be_low:
            return self
        return self._replace(cast="fp32", rule=None)

    @property
    def origin(self) -> str:
        """Where the rule is written; empty without one."""
        return self.rule.origin if self.rule else ""

    def recorded(self, *, kept: bool = False) -> dict[str, Any]:
        """What a `DecisionRecord` says of the rule; `kept`: whether the operation stays as it is in spite of it."""
        source, origin = (self.rule.source, self.rule.origin) if self.rule and not kept else ("", "")
        return {"cast": "keep" if kept else self.cast, "layer": self.layer, "source": source, "origin": origin}


class Match(NamedTuple):
    """A rule, and the one of its patterns that reaches an operation."""

    pattern: str
    rule: Rule


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuleLayer:
    """Rules of one rank: within a layer no operation may get two casts."""

    layer: Layer
    origin: str
    rules: tuple[Rule, ...]
    _exact: Mapping[str, Rule] = dataclasses.field(init=False, repr=False, compare=False)
    _native: Mapping[str, tuple[Match, ...]] = dataclasses.field(init=False, repr=False, compare=False)
    """ATen name -> rules that name it by a name of jaxpr or StableHLO."""
    _globs: tuple[Match, ...] = dataclasses.field(init=False, repr=False, compare=False)
    _module_patterns: tuple[Match, ...] = dataclasses.field(init=False, repr=False, compare=False)
    _hash: int = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        pairs = [Match(operation, rule) for rule in self.rules for operation in rule.operations]
        exact: dict[str, Rule] = {}
        for operation, rule in pairs:
            if operation in exact:
                raise PolicyError(
                    f"{rule.origin}: operation {operation!r} is written twice; its other row is "
                    f"{exact[operation].origin}. Keep one of them"
                )
            exact[operation] = rule
        object.__setattr__(self, "_exact", exact)
        for_modules = tuple(pair for pair in pairs if module_patterns.is_module_pattern(pair.pattern))
        object.__setattr__(self, "_module_patterns", for_modules)
        globs = tuple(p for p in pairs if p not in for_modules and op_catalog.is_glob(p.pattern))
        object.__setattr__(self, "_globs", globs)
        native: dict[str, tuple[Match, ...]] = {}
        for pair in () if self.layer == "builtin" else pairs:
            if pair not in globs and pair not in for_modules:
                for name in op_catalog.native(pair.pattern):
                    native[name] = (*native.get(name, ()), pair)
        object.__setattr__(self, "_native", native)
        object.__setattr__(self, "_hash", hash((self.layer, self.origin, self.rules)))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return _reduce(self)

    def find(self, operation: str, path: str | None = None, same: tuple[str, ...] = ()) -> tuple[Match, ...]:
        """The rules for `operation` in this layer, which agree; a rule for the module at `path` wins over the others.

        Args:
            operation: exact ATen name.
            path: of the module.
            same: ATen names that the front cannot tell from `operation`: a user's rule for them counts.

        Raises:
            PolicyError: two rules reach it with different casts.
        """
        names = (operation, *same)
        if path is not None and self._module_patterns:
            matches = [
                pair
                for pair in self._module_patterns
                if any(module_patterns.reaches(pair.pattern, name, path) for name in names)
            ]
            if matches:
                inner = module_patterns.innermost([(pair.pattern, pair) for pair in matches])
                return _agreed(inner, names, f" in module {path!r}")
        if self.layer == "builtin":
            found = self._exact.get(operation)
            return () if found is None else (Match(operation, found),)
        reached = [pair for name in names for pair in self._reaching(name)]
        return _agreed(reached, names) if reached else ()

    def _reaching(self, operation: str) -> list[Match]:
        bare = op_catalog.packet(operation)
        if bare in op_catalog.catalogue().no_rule:
            return []
        reached = [Match(name, self._exact[name]) for name in dict.fromkeys((operation, bare)) if name in self._exact]
        reached += self._native.get(operation, ())
        if operation in op_catalog.catalogue().classes:
            reached += [pair for pair in self._globs if op_catalog.fits(pair.pattern, operation)]
        return reached

    def reach(self) -> frozenset[str]:
        """Known operations that its rules reach, wherever they run."""
        if self.layer == "builtin":
            return frozenset(name for name in self._exact if not module_patterns.is_module_pattern(name))
        patterns = (pattern for pattern in self._exact if not module_patterns.is_module_pattern(pattern))
        return frozenset(name for pattern in patterns for name in op_catalog.matching(pattern)) - _NO_OPERATION

    def reach_in_modules(self) -> frozenset[str]:
        """Operations that its rules for modules reach inside these."""
        reached = frozenset(n for pair in self._module_patterns for n in module_patterns.operations(pair.pattern))
        return reached - _NO_OPERATION


def _agreed(reached: list[Match], names: tuple[str, ...], where: str = "") -> tuple[Match, ...]:
    rules = dict.fromkeys(pair.rule for pair in reached)
    if len({rule.cast for rule in rules}) > 1:
        listed = "; ".join(f"{_short(rule)} ({rule.origin})" for rule in rules)
        alike = f", which here is the same as {', '.join(names[1:])}," if len(names) > 1 else ""
        raise PolicyError(
            f"operation {names[0]!r}{alike}{where} is reached by rules of one layer that disagree: {listed}. Name it "
            "in one of them, or in two layers: of XLA_AMP_RULES, policy.override and rules= the later one wins"
        )
    return tuple(reached)


def _short(rule: Rule) -> str:
    shown = ", ".join(rule.operations[:3]) + (", ..." if len(rule.operations) > 3 else "")
    return f"{shown} = {rule.cast}"


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Policy:
    """A low dtype and layers of rules; a later layer wins.

    Equal by value and hashable, so it can be a key.  `decide` gives the cast of an operation.
    """

    name: str
    low: LowDtype
    """Default low dtype; of the PyTorch front, if `jax_low` is another."""
    jax_low: LowDtype
    """Default low dtype of the JAX and StableHLO fronts."""
    dtypes: tuple[LowDtype, ...]
    """Low dtypes that a region may choose."""
    layers: tuple[RuleLayer, ...]
    """Lowest rank first."""
    summary: str = ""
    source: str = ""
    base: Policy | None = dataclasses.field(default=None, compare=False)
    """For the result of `resolve`: the policy before file, environment, overrides and context."""
    _hash: int = dataclasses.field(init=False, compare=False)
    by_module: bool = dataclasses.field(init=False, compare=False)
    """Whether a rule depends on the module; if none does, modules need not be followed."""
    from_user: bool = dataclasses.field(init=False, compare=False)
    """Whether a rule is the user's; if none is, none can be without an effect."""
    _decisions: dict[Any, Decision] = dataclasses.field(init=False, compare=False)

    def __post_init__(self) -> None:
        fields: dict[str, Any] = {"_decisions": {}}
        fields["by_module"] = any(layer._module_patterns for layer in self.layers)
        fields["from_user"] = any(layer.layer != "builtin" for layer in self.layers)
        fields["_hash"] = hash((self.name, self.low, self.jax_low, self.dtypes, self.layers))
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return _reduce(self)

    def __repr__(self) -> str:
        layers = ", ".join(f"{layer.layer} {layer.origin}" for layer in self.layers)
        return f"Policy({self.name!r}, low={self.low!r}, layers=[{layers}])"

    @property
    def named_low(self) -> str:
        """The default low dtypes in words: ``"bfloat16"``, or ``"float16 (JAX, StableHLO: bfloat16)"``."""
        return self.low if self.jax_low == self.low else f"{self.low} (JAX, StableHLO: {self.jax_low})"

    def offered(self, dtype: Any) -> LowDtype:
        """The low dtype that a caller names: a string, or a dtype of NumPy, JAX or torch.

        Raises:
            UnsupportedDtypeError: the policy does not offer it.
        """
        name = str(getattr(dtype, "name", getattr(dtype, "__name__", dtype))).removeprefix("torch.")
        name = {"bf16": "bfloat16", "f16": "float16", "fp16": "float16", "half": "float16"}.get(name, name)
        for low in self.dtypes:
            if name == low:
                return low
        raise UnsupportedDtypeError(
            f"autocast(dtype={dtype!r}): the policy {self.name!r} offers {', '.join(self.dtypes)}; pass one of them, "
            "or policy= with one that offers it"
        )

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules of all layers, lowest rank first."""
        return tuple(rule for layer in self.layers for rule in layer.rules)

    def decide(self, operation: str, path: str | None = None) -> Decision:
        """The cast of `operation`.

        Args:
            operation: ATen name with overload, as torch dispatches it: ``"mm"``, ``"softmax.int"``; without the
                overload where all of them have the same cast.
            path: path of the module that it runs in, as in ``named_modules``; None outside modules.

        Returns:
            The decision of the highest layer that has a rule; without one, ``keep``.

        Raises:
            PolicyError: two rules of one layer disagree about it, its overloads have different casts, or there is no
                such operation.

        Example:
            >>> from xla_amp.policy import load
            >>> load("tpu").decide("mm").cast
            'low'
        """
        decision = self.decision(operation, path)
        overloads = op_catalog.overloads(operation) if decision.rule is None else ()
        if not overloads:
            return decision
        decisions = [self.decision(each, path) for each in overloads]
        if len({each.cast for each in decisions}) > 1:
            listed = ", ".join(f"{each.operation} = {each.cast}" for each in decisions)
            raise PolicyError(f"decide({operation!r}): its overloads have different casts, name one of them: {listed}")
        return decisions[0]._replace(operation=operation)

    def decision(self, operation: str, path: str | None = None, same: tuple[str, ...] = ()) -> Decision:
        """`decide` of an operation that a front has met; cached, so asking again costs one dict lookup.

        Args:
            operation: as `decide`; one that no table knows is kept.
            path: as `decide`.
            same: further ATen names that it may stand for, in a front with another vocabulary
                (`xla_amp.policy.op_catalog.meanings`): a user's rule for one of them decides, too.

        Raises:
            PolicyError: two rules of one layer disagree about it.
        """
        key: Any = operation if (path is None or not self.by_module) and not same else (operation, path, same)
        decision = self._decisions.get(key)
        if decision is None:
            decision = self._decide(operation, path, same)
            self._decisions[key] = decision
        return decision

    def reaching(self, operation: str, path: str | None = None, same: tuple[str, ...] = ()) -> frozenset[Match]:
        """The user's rules that reach `operation`, those that a later layer outranks included."""
        return frozenset(
            pair for layer in self.layers if layer.layer != "builtin" for pair in layer.find(operation, path, same)
        )

    def _decide(self, operation: str, path: str | None = None, same: tuple[str, ...] = ()) -> Decision:
        winner: Decision | None = None
        for layer in reversed(self.layers):
            found = layer.find(operation, path, same)
            if found and winner is None:
                winner = Decision(operation, found[0].rule.cast, layer.layer, found[0].rule)
        return winner or Decision(operation, "keep", "builtin", None)

    def casts(self) -> Mapping[str, Cast]:
        """Known operations with a rule other than ``keep``, by exact ATen name, and their casts outside modules."""
        decided = {operation: self._decide(operation).cast for operation in sorted(self.ruled())}
        return {operation: cast for operation, cast in decided.items() if cast != "keep"}

    def operations(self) -> frozenset[str]:
        """Exact ATen names that have a rule other than ``keep``."""
        return frozenset(self.casts())

    def ruled(self) -> frozenset[str]:
        """Exact ATen names that some rule reaches, ``keep`` rules included."""
        return frozenset[str]().union(*(layer.reach() for layer in self.layers))

    def ruled_in_modules(self) -> frozenset[str]:
        """Exact ATen names that some rule reaches inside a module."""
        return frozenset[str]().union(*(layer.reach_in_modules() for layer in self.layers))

    def outside(self, operation: str) -> tuple[Cast, bool]:
        """Cast of `operation` outside modules, and whether a rule gives it."""
        decision = self._decide(operation)
        return decision.cast, decision.rule is not None


@functools.lru_cache(maxsize=256)
def decided_as_a_whole(policy: Policy) -> frozenset[str]:
    """Operations that a program may contain in parts (`op_catalog.composite`) and that a rule may decide."""
    names = {name for name, _ in op_catalog.catalogue().composites.values()}
    return frozenset(
        name for name in names if policy.by_module or policy.decision(name, None, op_catalog.same_as(name)[1:]).of_whole
    )
