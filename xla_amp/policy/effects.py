"""Which of the user's rules have an effect, and the report of those that have none.

A rule is judged by pattern (`Match`): a pattern has an effect if an operation that it reaches follows the rules, also
if a later layer outranks it.  There is one counter for each pattern (`Use`), in this process and in each program.  A
front that applies a policy to a whole program collects them (`collect`, `note`) and then calls `report`; torch's
kernels call `asked`.  Built-in rules are not counted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager
from typing import Any, Final, Generic, NamedTuple, TypeVar

from xla_amp.common import events
from xla_amp.common.types import Layer
from xla_amp.errors import PolicyError, RuleWarning
from xla_amp.policy import module_patterns, op_catalog
from xla_amp.policy.op_catalog import Vocabulary
from xla_amp.policy.policy import Match, Policy, RuleLayer

_FRONTS: Final[dict[Vocabulary, str]] = {"jaxpr": "JAX", "stablehlo": "StableHLO"}
_FOR_THIS_CALL: Final[frozenset[Layer]] = frozenset({"override", "context"})
"""Layers that are written for the code that they are around; files and the environment are shared by programs."""

_T = TypeVar("_T")


@dataclasses.dataclass(slots=True)
class Use:
    """What operations did with one pattern of a user's rule."""

    followed: int = 0
    """How many operations, or parts of programs, follow the rules there."""
    kept: str = ""
    """Why an operation does not follow the rule, if one does not."""
    judged: bool = False
    """Whether a report has judged it, which is not repeated."""


class Effects:
    """The patterns that reached operations: of one program, or of the process."""

    def __init__(self) -> None:
        self.uses: defaultdict[Match, Use] = defaultdict(Use)
        self.paths: set[str] = set()
        """Paths of the modules of the program, if rules for modules are in force."""

    def add(self, reached: Iterable[Match], why_kept: str = "") -> None:
        """Counts the patterns that reach one operation; `why_kept`: why it does not follow them, empty if it does."""
        for pair in reached:
            use = self.uses[pair]
            use.followed += not why_kept
            use.kept = use.kept or why_kept

    def merge(self, other: Effects) -> None:
        """Adds the effects on a part of the program."""
        self.paths |= other.paths
        for pair, use in other.uses.items():
            self.uses[pair].followed += use.followed
            self.uses[pair].kept = self.uses[pair].kept or use.kept

    def follows(self, pair: Match) -> bool:
        """Whether an operation follows the rules where the pattern reaches it."""
        return pair in self.uses and self.uses[pair].followed > 0


_process = Effects()
"""By value: a policy may be resolved several times."""
_decided: set[RuleLayer] = set()
"""Layers of policies that have decided an operation of torch."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.open = [_process]


_thread = _Thread()


@contextlib.contextmanager
def collect() -> Iterator[Effects]:
    """Collects what `note` gets on this thread; an outer block gets it as well, and in the end the process."""
    effects = Effects()
    _thread.open.append(effects)
    try:
        yield effects
    finally:
        _thread.open.pop()
        _thread.open[-1].merge(effects)


def note(reached: Iterable[Match], why_kept: str = "", path: str | None = None) -> None:
    """`Effects.add` for the innermost `collect` of this thread; `path`: of the operation's module."""
    effects = _thread.open[-1]
    effects.add(reached, why_kept)
    if path and effects is not _process:
        effects.paths.add(path)


class Remembered(NamedTuple, Generic[_T]):
    """A part of a program that was made once."""

    made: _T
    effects: Effects
    decisions: tuple[events.DecisionRecord, ...]
    """What was told while it was made, if something listened."""


def remembered(
    cache: MutableMapping[Any, Remembered[_T]], key: Any, make: Callable[[], _T], *, place: str | None = None
) -> _T:
    """What `make` returns for a part of a program, from `cache` if it is there; its effects are counted each time.

    While something listens to decisions, those of `make` are told each time.

    `place`: what decisions say of where the part is; None if they are told only while it is made, then each time.
    """
    if listens := bool(events.decided.listeners):
        key = key, place
    found = cache.get(key)
    if found is not None and not (listens and place is None):
        _thread.open[-1].merge(found.effects)
        for record in found.decisions if listens else ():
            events.decided(record)
        return found.made
    decisions: list[events.DecisionRecord] = []
    with collect() as effects, _heard(decisions) if listens else contextlib.nullcontext():
        made = make()
    cache[key] = Remembered(made, effects, tuple(decisions))
    return made


def _heard(decisions: list[events.DecisionRecord]) -> AbstractContextManager[None]:
    """Adds the decisions of this thread to a list."""
    thread = threading.get_ident()

    def hear(record: events.DecisionRecord) -> None:
        if threading.get_ident() == thread:
            decisions.append(record)

    return events.decided.subscribed(hear)


def asked(policy: Policy, operation: str, path: str | None) -> None:
    """An operation of torch, in the module at `path`, is decided by `policy`."""
    _process.add(policy.reaching(operation, path))
    _decided.update(policy.layers)


def _patterns(layers: Iterable[RuleLayer]) -> Iterator[tuple[RuleLayer, Match]]:
    """The patterns of users' rules, with their layers."""
    for layer in layers:
        for rule in () if layer.layer == "builtin" else layer.rules:
            yield from ((layer, Match(pattern, rule)) for pattern in rule.operations)


def unused(layers: Iterable[RuleLayer]) -> list[Match]:
    """The users' rules in `layers`, by pattern, that have had no effect in this process."""
    return [pair for _, pair in _patterns(layers) if not _process.follows(pair)]


@functools.cache
def _visible(vocabulary: Vocabulary) -> set[str]:
    catalogue = op_catalog.catalogue()
    visible = set(op_catalog.native("dot_general"))
    if vocabulary == "jaxpr":
        visible.update(each for name, _ in catalogue.composites.values() for each in op_catalog.same_as(name))
    return visible.union(*(op_catalog.meanings(vocabulary, name) for name in catalogue.names[vocabulary]))


def invisible(pattern: str, vocabulary: Vocabulary) -> str:
    """Why no program in `vocabulary` has an operation that `pattern` reaches; empty if one may have."""
    if pattern == op_catalog.WHILE_LOOP:
        return ""
    if module_patterns.is_module_pattern(pattern) or not _visible(vocabulary).isdisjoint(op_catalog.matching(pattern)):
        return ""
    front = _FRONTS[vocabulary]
    if "::" in pattern:
        return f"it is an operator of a torch library, which {front} programs do not contain"
    return f"{front} programs contain only its parts, or write it in another way; name the parts"


def report(policy: Policy, effects: Effects, vocabulary: Vocabulary, *, strict: bool, no_modules: str = "") -> None:
    """Reports the user's rules in `policy` that had no effect.

    A warning, or with `strict` an error.  A rule of an override or of the call that no program of the front can follow
    is always an error.

    Args:
        policy: with its layers.
        effects: of the program.
        vocabulary: of the program.
        strict: see above.
        no_modules: why no rule for modules can match in this program; empty if one can.

    Raises:
        PolicyError: see above.
    """
    without: dict[str, None] = {}
    never: dict[str, None] = {}
    for layer, pair in _patterns(policy.layers):
        _process.uses[pair].judged = True
        if effects.follows(pair):
            continue
        by_module = module_patterns.is_module_pattern(pair.pattern)
        hidden = invisible(pair.pattern, vocabulary) or (no_modules if by_module else "")
        why = hidden or (effects.uses[pair].kept if pair in effects.uses else "")
        nearest = module_patterns.nearest(pair.pattern, effects.paths) if by_module else ""
        why = why or f"it matched no operation of the program{nearest}"
        (never if hidden and layer.layer in _FOR_THIS_CALL else without)[_line(pair, why)] = None
    _raise_or_warn([*never, *(without if strict else ())], [*without], f"the {_FRONTS[vocabulary]} program")


def report_unmatched(layer: RuleLayer, *, strict: bool, once: bool = False) -> None:
    """Reports the rules of a block that closes and have had no effect in this process.

    Nothing is reported if no operation of torch has been decided with them: the block ran nothing under autocast.

    Args:
        layer: the rules.
        strict: raise instead of a warning.
        once: not for a second block with the same rules.

    Raises:
        PolicyError: with `strict`.
    """
    if layer not in _decided:
        return
    found = [pair for pair in unused((layer,)) if not _process.uses[pair].judged]
    for pair in found if once else ():
        _process.uses[pair].judged = True
    versions = op_catalog.catalogue().torch
    torch = {pair: f"; torch{versions[pair.pattern]} has it" for pair in found if pair.pattern in versions}
    lines = [_line(pair, f"it has matched no operation{torch.get(pair, '')}") for pair in found]
    _raise_or_warn(lines if strict else [], lines, "what ran under autocast")


def _line(pair: Match, why: str) -> str:
    return f"{pair.pattern} = {pair.rule.cast} ({pair.rule.origin}): {why}"


def _raise_or_warn(errors: list[str], warnings: list[str], program: str) -> None:
    lines = errors or warnings
    many = "this rule has" if len(lines) == 1 else "these rules have"
    text = f"{many} no effect on {program}:\n  " + "\n  ".join(lines)
    if errors:
        raise PolicyError(text)
    if warnings:
        events.warn(text, RuleWarning)
