"""The effective policy: built-in rules, and on top file, environment, overrides and the local context.

Every layer is built once for its text, so resolving again without a change costs a few dict lookups and returns the
identical object.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType

from xla_amp.common import config, events
from xla_amp.common.types import Cast, Layer
from xla_amp.errors import PolicyError
from xla_amp.policy import effects, regions
from xla_amp.policy.load import PolicyLike, check, load, rule, rules_from_file, signature
from xla_amp.policy.policy import Policy, Rule, RuleLayer


def resolve(policy: PolicyLike, context: Mapping[str, Cast] | None = None) -> Policy:
    """`policy` with every layer that applies now.

    Lowest rank first: built-in table, rows of the policy's own file, the file in ``XLA_AMP_POLICY``, ``XLA_AMP_RULES``,
    open overrides of this thread, and the rules in `context`.

    Equal layers give the identical object.  Resolving a resolved policy starts from its base and keeps its context
    rules.

    Args:
        policy: name, path or `Policy`.
        context: rules of the local block, operation (name or glob) to cast.

    Raises:
        PolicyError: one of the layers cannot be followed.
    """
    given = policy if isinstance(policy, Policy) else load(policy)
    base = given
    local: tuple[RuleLayer, ...] = ()
    if given.base is not None:
        base = given.base
        local = tuple(layer for layer in given.layers if layer.layer == "context")
    if context:
        local = (*local, _mapping_layer("context", rule_items(context)))
    # Runs on every entry of a region, so each part is skipped without a call where it is not used.
    layers = base.layers
    file, text = config.policy_file(), config.rules()
    if file is not None:
        layers = (*layers, rules_from_file(*signature(file)))
    if text:
        layers = (*layers, *_environment(text))
    if overrides.open or local:
        layers = (*layers, *overrides.open, *local)
    return base if layers is base.layers else _effective(base, layers)


@functools.lru_cache(maxsize=512)
def _effective(base: Policy, layers: tuple[RuleLayer, ...]) -> Policy:
    return Policy(
        name=base.name,
        low=base.low,
        jax_low=base.jax_low,
        dtypes=base.dtypes,
        layers=layers,
        summary=base.summary,
        source=base.source,
        base=base,
    )


@functools.lru_cache(maxsize=64)
def _environment(text: str) -> tuple[RuleLayer, ...]:
    rules: list[Rule] = []
    for number, item in enumerate(filter(None, (part.strip() for part in text.split(";"))), 1):
        where = f"{config.RULES}, rule {number} ({item!r})"
        operation, equals, cast = (part.strip() for part in item.partition("="))
        if not (operation and equals and cast):
            raise PolicyError(f'{where}: expected operation=cast, e.g. "softmax=fp32;mm=low"')
        rules.append(rule(where, [operation], cast, why=f"asked for in {config.RULES}", source=config.RULES))
    if not rules:
        return ()
    return (check(RuleLayer(layer="environment", origin=config.RULES, rules=tuple(rules))),)


def rule_items(rules: Mapping[str, Cast]) -> tuple[tuple[str, Cast], ...]:
    """The items of a mapping of rules.

    Raises:
        PolicyError: it is no mapping of names to casts.
    """
    if not isinstance(rules, Mapping):
        raise PolicyError(f'rules map names to casts, e.g. {{"softmax": "fp32"}}; got {rules!r}')
    for operation, cast in rules.items():
        if not isinstance(operation, str) or not isinstance(cast, str):
            raise PolicyError(f'rules map names to casts, e.g. {{"softmax": "fp32"}}; got {operation!r}: {cast!r}')
    return tuple(rules.items())


@functools.lru_cache(maxsize=1024)
def _mapping_layer(layer: Layer, items: tuple[tuple[str, Cast], ...]) -> RuleLayer:
    origin = "policy.override" if layer == "override" else "autocast(rules=...)"
    rules: list[Rule] = []
    for operation, cast in items:
        where = f"{origin}, {operation!r}"
        rules.append(rule(where, [operation], cast, why=f"asked for by {origin}", source=origin))
    return check(RuleLayer(layer=layer, origin=origin, rules=tuple(rules)))


class _Overrides(threading.local):
    def __init__(self) -> None:
        self.stack: list[tuple[override, contextlib.ExitStack]] = []
        """The open overrides, innermost last, and what ends with each."""
        self.open: tuple[RuleLayer, ...] = ()


overrides = _Overrides()


@events.Point
def overriding(layer: RuleLayer, opens: bool, /) -> None:
    """When an override opens and when it closes, on its thread.

    For a front that must act even where no `xla_amp.autocast` region is open.
    """


def _tell(layers: Iterable[RuleLayer], undo: contextlib.ExitStack) -> None:
    """Tells the listeners that overrides open, and when `undo` ends that they close."""
    for layer in layers:
        for listener in overriding.listeners:
            listener(layer, True)
            undo.callback(listener, layer, False)


def overridden(policy: Policy) -> Policy:
    """`policy` with only this thread's open overrides, below the rules of its context.

    It is `policy` itself when none is open, or when it has them.
    """
    if not overrides.open:
        return policy
    local = tuple(layer for layer in policy.layers if layer.layer == "context")
    below = policy.layers[: len(policy.layers) - len(local)]
    has_them = below[-len(overrides.open) :] == overrides.open
    return policy if has_them else _effective(policy, (*below, *overrides.open, *local))


class override:
    """Context manager: rules for this thread, on top of any policy, also inside an open region.

    An inner override wins over an outer one.  The same object may be entered again while it is open.

    Args:
        rules: mapping from an operation (name or glob), ``class:<operation class>`` or ``module:<path>`` to a cast; the
            path is that of ``named_modules``, with globs or a final operation (``"module:*.attention.softmax"``).
        strict: a rule that has matched no operation when the block ends is an error instead of a `RuleWarning`, if the
            block ran operations under autocast.
        **casts: casts by operation, for names that are Python identifiers.

    Raises:
        PolicyError: an unknown operation, class or cast, one operation given twice, or rules that disagree.

    Example:
        >>> from xla_amp.policy import resolve
        >>> with override(softmax="low"):
        ...     resolve("tpu").decide("softmax.int").cast
        'low'
    """

    def __init__(
        self,
        rules: Mapping[str, Cast] | None = None,
        /,
        *,
        strict: bool = False,
        **casts: Cast,
    ) -> None:
        given = dict(rule_items({} if rules is None else rules))
        if twice := sorted(set(given) & set(casts)):
            raise PolicyError(f"override(): {', '.join(twice)} is given as a mapping and as a keyword; keep one")
        if not given and not casts:
            raise PolicyError('override() without rules would change nothing; pass some: override({"softmax": "fp32"})')
        self.layer = _mapping_layer("override", rule_items({**given, **casts}))
        """The rules, for the fronts."""
        self._strict = strict

    def __repr__(self) -> str:
        rules = {operation: rule.cast for rule in self.layer.rules for operation in rule.operations}
        return f"override({rules}{', strict=True' if self._strict else ''})"

    def __enter__(self) -> None:
        undo = contextlib.ExitStack()
        overrides.stack.append((self, undo))
        overrides.open = (*overrides.open, self.layer)
        try:
            _tell((self.layer,), undo)
            for device_type, region in regions.open_here().items():
                changed = dataclasses.replace(region, policy=resolve(region.policy))
                undo.callback(regions.pop, regions.push(device_type, changed))
        except BaseException:
            self._close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()
        if kind is None and all(entered is not self for entered, _ in overrides.stack):
            effects.report_unmatched(self.layer, strict=self._strict)

    def _close(self) -> None:
        stack = overrides.stack
        newest = max(number for number, (entered, _) in enumerate(stack) if entered is self)
        _, undo = stack.pop(newest)
        overrides.open = tuple(entered.layer for entered, _ in stack)
        undo.close()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class OpenRules:
    """The regions and overrides that are in force on a thread, for what runs again after they were closed."""

    regions: Mapping[str, regions.Region]
    overrides: tuple[override, ...]


def open_rules() -> OpenRules | None:
    """The regions and overrides in force on this thread; None without any."""
    of_thread = regions.in_force()
    if not of_thread and not overrides.stack:
        return None
    return OpenRules(regions=of_thread, overrides=tuple(entered for entered, _ in overrides.stack))


@contextlib.contextmanager
def reopened(saved: OpenRules) -> Iterator[None]:
    """Puts this thread's regions and overrides aside, and those of `saved` in their place."""
    before = overrides.stack, overrides.open
    layers = tuple(entered.layer for entered in saved.overrides)
    with contextlib.ExitStack() as undo:
        _tell(layers, undo)
        overrides.stack, overrides.open = [(entered, contextlib.ExitStack()) for entered in saved.overrides], layers
        try:
            with regions.reopened(saved.regions):
                yield
        finally:
            overrides.stack, overrides.open = before


def unused_rules(policy: PolicyLike) -> tuple[Rule, ...]:
    """Rules of file, environment, overrides and context without an effect so far, e.g. after training.

    A rule with several patterns is listed with those that have had none.  Built-in rules are left out.  A rule that an
    operation met but a later layer outranked counts as used.  Rules of an override are included while it is open.
    """
    patterns: dict[Rule, list[str]] = {}
    for pattern, row in effects.unused(resolve(policy).layers):
        patterns.setdefault(row, []).append(pattern)
    return tuple(dataclasses.replace(row, operations=tuple(found)) for row, found in patterns.items())
