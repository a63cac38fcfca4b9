"""The effective policy: built-in rules, then file, environment, overrides and the local context on top.

Every layer is built once for the text that it comes from, so that resolving an unchanged situation costs a few dict
lookups and gives the identical object.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NoReturn

from xla_amp import config
from xla_amp.errors import PolicyError
from xla_amp.policy import module_patterns, op_catalog
from xla_amp.policy import regions as regions
from xla_amp.policy.load import PolicyLike, check, load, read_file, rule, rules_from_file, signature
from xla_amp.policy.op_catalog import matching
from xla_amp.policy.policy import Policy, Rule, RuleLayer
from xla_amp.types import Cast, Layer

_HPU: Final = "tables/hpu.toml"
_GAUDI_NAMES_NOTHING: Final = ("iadd", "truediv")
"""In Gaudi's documented lists, hence in files made from them; no ATen operation has these names, so they do nothing
there either."""
_GAUDI_PROMOTES_TOO: Final = ("addcdiv", "div", "exp", "mul", "pow")
"""In Gaudi's promote list, which cannot be replaced, besides a list that ranks higher; when a file replaces that one
and does not name them, they are promoted."""


def resolve(policy: PolicyLike, context: Mapping[str, Cast] | None = None) -> Policy:
    """`policy` with everything that applies to it now, in rising rank: built-in table, its file's own rows, the file
    in ``XLA_AMP_POLICY``, ``XLA_AMP_RULES`` (for ``hpu`` also Gaudi's lists), open overrides of this thread, and the
    rules in `context`.

    Equal layers give the identical object.  Resolving a resolved policy starts again from its base and keeps its
    context rules.

    Args:
        policy: name, path or `Policy`.
        context: rules of the local block, operation (name or glob) to cast.

    Raises:
        PolicyError: one of the layers cannot be followed.
    """
    given = load(policy)
    base = given
    local: tuple[RuleLayer, ...] = ()
    if given.base is not None:
        base = given.base
        local = tuple(layer for layer in given.layers if layer.layer == "context")
    if context:
        local = (*local, _mapping_layer("context", _items(context)))
    lists, above = _gaudi_lists(base), (*_file(), *_environment(config.rules()), *_overrides.open, *local)
    return _effective(base, lists, above) if above or lists[1] else base


_NO_LISTS: Final[tuple[tuple[RuleLayer, ...], frozenset[Cast]]] = ((), frozenset())


@functools.lru_cache(maxsize=512)
def _effective(
    base: Policy, lists: tuple[tuple[RuleLayer, ...], frozenset[Cast]], above: tuple[RuleLayer, ...]
) -> Policy:
    layers = base.layers
    if lists[1]:
        layers = tuple(level for layer in layers for level in _with_lists(layer, *lists))
    return Policy(
        name=base.name,
        low=base.low,
        dtypes=base.dtypes,
        layers=(*layers, *above),
        summary=base.summary,
        source=base.source,
        base=base,
    )


def _file() -> tuple[RuleLayer, ...]:
    path = config.policy_file()
    return () if path is None else (rules_from_file(*signature(path)),)


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


def _items(rules: Mapping[str, Cast]) -> tuple[tuple[str, Cast], ...]:
    for operation, cast in rules.items():
        if not isinstance(operation, str) or not isinstance(cast, str):
            raise PolicyError(f'rules map names to casts, e.g. {{"softmax": "fp32"}}; got {operation!r}: {cast!r}')
    return tuple(rules.items())


@functools.lru_cache(maxsize=1024)
def _mapping_layer(layer: Layer, items: tuple[tuple[str, Cast], ...]) -> RuleLayer:
    origin = "policy.override" if layer == "override" else "autocast(policy=...)"
    rules: list[Rule] = []
    for operation, cast in items:
        where = f"{origin}, {operation!r}"
        rules.append(rule(where, [operation], cast, why=f"asked for by {origin}", source=origin))
    return check(RuleLayer(layer=layer, origin=origin, rules=tuple(rules)))


# Gaudi's lists. Its bridge asks, for each operation, first the low list, then fp32, then promote, whichever file or
# default they come from; so a list from a file takes the place of that cast's rows, in that order.


def _gaudi_lists(base: Policy) -> tuple[tuple[RuleLayer, ...], frozenset[Cast]]:
    if not any(layer.origin == _HPU for layer in base.layers):
        return (), frozenset()
    set_ = config.hpu_lists()
    layers = (_gaudi_list(cast, variable, *signature(path)) for cast, variable, path in set_)
    return tuple(layer for layer in layers if layer.rules), frozenset(cast for cast, _, _ in set_)


@functools.lru_cache(maxsize=64)
def _gaudi_list(cast: Cast, variable: str, path: Path, _mtime: int, _size: int) -> RuleLayer:
    rules: list[Rule] = []
    for number, line in enumerate(read_file(path).splitlines(), 1):
        operation = line.strip()
        if operation and operation not in _GAUDI_NAMES_NOTHING:
            where = f"{os.fspath(path)}:{number} ({variable})"
            rules.append(rule(where, [operation], cast, why=f"listed in the file of {variable}", source=variable))
    return check(RuleLayer(layer="environment", origin=variable, rules=tuple(rules)))


def _with_lists(layer: RuleLayer, lists: tuple[RuleLayer, ...], replaced: frozenset[Cast]) -> tuple[RuleLayer, ...]:
    if layer.origin != _HPU:
        return (layer,)
    levels: list[RuleLayer] = []
    for cast in ("promote", "fp32", "low"):
        if cast not in replaced:
            rows = tuple(row for row in layer.rules if row.cast == cast)
            if cast == "promote":
                rows += (_gaudi_promotes_too(rows[0]),)
            levels.append(RuleLayer(layer="builtin", origin=_HPU, rules=rows))
        levels.extend(level for level in lists if level.rules[0].cast == cast)
    return tuple(levels)


def _gaudi_promotes_too(like: Rule) -> Rule:
    operations = tuple(name for packet in _GAUDI_PROMOTES_TOO for name in matching(packet))
    note = "Documented in two lists; the other one was replaced by a file."
    return dataclasses.replace(like, operations=operations, note=note, origin=f"{_HPU}, promote list")


class _Overrides(threading.local):
    def __init__(self) -> None:
        self.stack: list[override] = []
        self.open: tuple[RuleLayer, ...] = ()


_overrides = _Overrides()
_listeners: tuple[Callable[[RuleLayer, bool], object], ...] = ()


def on_override(listener: Callable[[RuleLayer, bool], object]) -> None:
    """Calls ``listener(layer, True)`` when an override opens from now on and ``listener(layer, False)`` when it closes,
    on its thread.

    For a front that must also act where no region of ours is open.
    """
    global _listeners
    _listeners = (*_listeners, listener)


def overridden(policy: Policy) -> Policy:
    """`policy` with this thread's open overrides and nothing else on top; itself where there are none."""
    if not _overrides.open:
        return policy
    return _effective(policy, _NO_LISTS, _overrides.open)


class override:
    """Context manager: rules for this thread, on whatever policy is in force, also inside an open region.

    An inner override wins over an outer one.  The same object may be entered again while it is open.

    Args:
        rules: what to cast: an operation (name or glob), ``class:<operation class>`` or ``module:<path>`` to cast.
        module: path of modules as ``named_modules`` gives it, globs allowed, perhaps with an operation at the end
            (``"*.attention"``, ``"*.attention.softmax"``); gets `cast`.
        hlo_class: operation class (``"reduction"``, see `xla_amp.types.OperationClass`); gets `cast`.
        cast: the cast of `module` and of `hlo_class`.
        **casts: operation to cast, for names that are identifiers.

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
        module: str | None = None,
        hlo_class: str | None = None,
        cast: Cast | None = None,
        **casts: Cast,
    ) -> None:
        given: Mapping[str, Any] = {} if rules is None else rules
        if not isinstance(given, Mapping):
            raise PolicyError(f'override() expects a mapping such as {{"softmax": "fp32"}}, got {given!r}')
        named: dict[str, Any] = {**casts, **_aimed(module, hlo_class, cast)}
        if twice := sorted(set(given) & set(named)):
            raise PolicyError(f"override(): {', '.join(twice)} is given as a mapping and as a keyword; keep one")
        if not given and not named:
            _no_rules()
        self._layer = _mapping_layer("override", _items({**given, **named}))
        self._local = _Entered()

    def __enter__(self) -> None:
        self._local.tokens.append([])
        self._local.heard.append([])
        _overrides.stack.append(self)
        _overrides.open = tuple(entered._layer for entered in _overrides.stack)
        try:
            for listener in _listeners:
                listener(self._layer, True)
                self._local.heard[-1].append(listener)
            for device_type, region in regions.open_here().items():
                changed = dataclasses.replace(region, policy=resolve(region.policy))
                self._local.tokens[-1].append(regions.push(device_type, changed))
        except BaseException:
            self._close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        for token in reversed(self._local.tokens.pop()):
            regions.pop(token)
        for listener in self._local.heard.pop():
            listener(self._layer, False)
        stack = _overrides.stack
        del stack[len(stack) - 1 - stack[::-1].index(self)]
        _overrides.open = tuple(entered._layer for entered in stack)


class _Entered(threading.local):
    def __init__(self) -> None:
        self.tokens: list[list[regions.Token]] = []
        self.heard: list[list[Callable[[RuleLayer, bool], object]]] = []


def _aimed(module: Any, hlo_class: Any, cast: Any) -> dict[str, Any]:
    aims = {module_patterns.PREFIX: module, op_catalog.CLASS: hlo_class}
    found = {f"{prefix}{aim}": cast for prefix, aim in aims.items() if aim is not None}
    for word, aim in (("module", module), ("hlo_class", hlo_class)):
        if aim is not None and not isinstance(aim, str):
            raise PolicyError(f"override({word}={aim!r}): expected a string, got {type(aim).__name__}")
    if (cast is None) != (not found):
        raise PolicyError(
            'override(): module= and hlo_class= go with cast=, e.g. override(module="*.attention.softmax", '
            'cast="low"); an operation is written override({"softmax": "low"})'
        )
    return found


def _no_rules() -> NoReturn:
    raise PolicyError('override() without rules would change nothing; pass some, e.g. override({"softmax": "fp32"})')


def unused_rules(policy: PolicyLike) -> tuple[Rule, ...]:
    """Rules of file, environment, overrides and context that no operation has met so far, e.g. after a training run.

    Built-in rules are left out.  A rule that was met but outranked counts as used.  An override is seen while it is
    open.
    """
    effective = resolve(policy)
    rules = (row for layer in effective.layers if layer.layer != "builtin" for row in layer.rules)
    return tuple(row for row in rules if row not in effective._matched)
