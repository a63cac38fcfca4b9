"""Which of the user's rules have an effect, and the report of those that have none.

A rule is judged by pattern (`Reach`): a pattern has an effect if an operation that it reaches follows the rules, also
if a later layer outranks it.  A front that applies a policy to a whole program collects these (`collect`, `note`) and
then calls `report`; torch's kernels call `asked`.  Built-in rules are not reported.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterable, Iterator
from typing import Final

from xla_amp import config, events
from xla_amp.errors import PolicyError, RuleWarning
from xla_amp.policy import module_patterns, op_catalog
from xla_amp.policy.op_catalog import Vocabulary
from xla_amp.policy.policy import Policy, Reach, RuleLayer
from xla_amp.types import Layer

_FRONTS: Final[dict[Vocabulary, str]] = {"jaxpr": "JAX", "stablehlo": "StableHLO"}
_FOR_THIS_CALL: Final[frozenset[Layer]] = frozenset({"override", "context"})
"""Layers that are written for the code that they are around; files and the environment are shared by programs."""


_followed: set[Reach] = set()
"""Users' rules that have had an effect in this process, by value: a policy may be resolved several times."""


def unused(layers: Iterable[RuleLayer]) -> list[Reach]:
    """The users' rules in `layers`, by pattern, that have had no effect in this process."""
    pairs = (
        Reach(pattern, rule)
        for layer in layers
        if layer.layer != "builtin"
        for rule in layer.rules
        for pattern in rule.operations
    )
    return [pair for pair in pairs if pair not in _followed]


class Effects:
    """The user's rules that reached operations of one program."""

    def __init__(self) -> None:
        self.followed: set[Reach] = set()
        self.kept: dict[Reach, str] = {}
        """Rules that an operation does not follow, and why."""
        self.paths: set[str] = set()
        """Paths of the modules of the program, if rules for modules are in force."""

    def add(self, reached: Iterable[Reach], why_kept: str = "") -> None:
        """Notes the rules that reach one operation; `why_kept`: why it does not follow them, empty if it does."""
        if why_kept:
            for pair in reached:
                self.kept.setdefault(pair, why_kept)
        else:
            self.followed.update(reached)
            _followed.update(reached)

    def merge(self, other: Effects) -> None:
        """Adds the effects on a part of the program."""
        self.followed |= other.followed
        self.paths |= other.paths
        self.kept = {**other.kept, **self.kept}


class _Thread(threading.local):
    def __init__(self) -> None:
        self.open: list[Effects] = []


_thread = _Thread()


@contextlib.contextmanager
def collect() -> Iterator[Effects]:
    """Collects what `note` gets on this thread; an outer block gets it as well."""
    effects = Effects()
    _thread.open.append(effects)
    try:
        yield effects
    finally:
        _thread.open.pop()
        if _thread.open:
            _thread.open[-1].merge(effects)


def note(reached: Iterable[Reach], why_kept: str = "", path: str | None = None) -> None:
    """`Effects.add` for the innermost `collect` of this thread, if there is one; `path`: of the operation's module."""
    effects = _thread.open[-1] if _thread.open else Effects()
    effects.add(reached, why_kept)
    if path:
        effects.paths.add(path)


def repeat(effects: Effects) -> None:
    """Notes the effects on a part of the program that has been collected before."""
    if _thread.open:
        _thread.open[-1].merge(effects)


def _hint(pattern: str, vocabulary: Vocabulary, paths: set[str]) -> str:
    """What else to know about a pattern that matched nothing in a program with modules at `paths`."""
    if module_patterns.is_module_pattern(pattern):
        return module_patterns.nearest(pattern, paths)
    return ""


@functools.cache
def _visible(vocabulary: Vocabulary) -> frozenset[str]:
    catalogue = op_catalog.catalogue()
    names = catalogue.jaxpr if vocabulary == "jaxpr" else catalogue.stablehlo
    others = set(op_catalog.native("dot_general"))
    if vocabulary == "jaxpr":
        others.update(operation for operation, _ in catalogue.composites.values())
    return frozenset(each for name in names for each in op_catalog.meanings(vocabulary, name)).union(others)


def _is_gradient_sum(pattern: str) -> bool:
    if module_patterns.is_module_pattern(pattern):
        return op_catalog.GRADIENT_SUM in module_patterns.parse(pattern).operations
    return pattern == op_catalog.GRADIENT_SUM


def _is_for_all(layer: RuleLayer) -> bool:
    """Whether other calls see the layer, too: one for all policies."""
    return layer.layer in ("override", "environment") or layer.origin == str(config.policy_file())


def invisible(pattern: str, vocabulary: Vocabulary) -> str:
    """Why no program in `vocabulary` has an operation that `pattern` reaches; empty if one may have."""
    if _is_gradient_sum(pattern):
        if vocabulary == "stablehlo":
            return "collectives keep their dtypes; change them where the program is made"
        return "xla_amp.jax.reduce_gradients follows it: give it policy=, or put an override around both"
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
    _reported.update(Reach(name, rule) for layer in policy.layers for rule in layer.rules for name in rule.operations)
    without: dict[str, None] = {}
    never: dict[str, None] = {}
    for layer in policy.layers:
        for rule in () if layer.layer == "builtin" else layer.rules:
            for pattern in rule.operations:
                pair = Reach(pattern, rule)
                if pair in effects.followed:
                    continue
                hidden = invisible(pattern, vocabulary)
                if vocabulary == "jaxpr" and _is_gradient_sum(pattern) and _is_for_all(layer):
                    continue
                hidden = hidden or (no_modules if module_patterns.is_module_pattern(pattern) else "")
                why = hidden or effects.kept.get(pair)
                why = why or f"it matched no operation of the program{_hint(pattern, vocabulary, effects.paths)}"
                line = f"{pattern} = {rule.cast} ({rule.origin}): {why}"
                (never if hidden and layer.layer in _FOR_THIS_CALL else without)[line] = None
    if never or (without and strict):
        raise PolicyError(_text([*never, *(without if strict else ())], f"the {_FRONTS[vocabulary]} program"))
    if without:
        _warn(_text([*without], f"the {_FRONTS[vocabulary]} program"))


_asked: set[RuleLayer] = set()
"""Layers of policies that have decided an operation of torch."""
FUSED: Final = "scaled_dot_product_attention"
"""An operation of torch with another inside, which rules for that do not reach."""
_INSIDE: Final = ("softmax.int", "softmax", "_softmax")
_fused: set[RuleLayer] = set()
"""Layers of policies that have decided `FUSED`."""


@functools.lru_cache(maxsize=8192)
def asked(policy: Policy, operation: str, path: str | None) -> None:
    """An operation of torch, in the module at `path`, is decided by `policy`."""
    _asked.update(policy.layers)
    _followed.update(policy.reaching(operation, path))
    if operation == FUSED:
        _fused.update(policy.layers)


def _instead(pair: Reach, layer: RuleLayer) -> str:
    """What to write for an operation that ran inside `FUSED`."""
    inner = next((name for name in _INSIDE if pair.pattern == name or pair.pattern.endswith(f".{name}")), "")
    if not inner or layer not in _fused:
        return ""
    outer = pair.pattern.removesuffix(inner) + FUSED
    return f"; it is a part of {FUSED}, which ran: write {outer} = {pair.rule.cast}"


_reported: set[Reach] = set()
"""Users' rules that `report` has judged; `report_unmatched` leaves them out."""


def report_unmatched(layer: RuleLayer, *, strict: bool) -> None:
    """Reports the rules of an override that closes and have had no effect in this process.

    Nothing is reported if no operation has been decided with them: the block ran nothing under autocast.  A rule for
    the sums of gradients is left out: they may come after the block.

    Raises:
        PolicyError: with `strict`, instead of a warning.
    """
    if layer not in _asked:
        return
    lines = [
        f"{pair.pattern} = {pair.rule.cast} ({pair.rule.origin}): it has matched no operation{_instead(pair, layer)}"
        for pair in unused((layer,))
        if pair not in _reported and not _is_gradient_sum(pair.pattern)
    ]
    if lines and strict:
        raise PolicyError(_text(lines, "what ran under autocast"))
    if lines:
        _warn(_text(lines, "what ran under autocast"))


@functools.lru_cache(maxsize=256)
def report_sums(policy: Policy, device_type: str) -> None:
    """Warns, once, of rules for the sums of gradients on a device of torch's own."""
    pairs = [Reach(pattern, rule) for rule in policy.rules for pattern in rule.operations if _is_gradient_sum(pattern)]
    lines = [
        f"{pair.pattern} = {pair.rule.cast} ({pair.rule.origin}): torch's DistributedDataParallel adds gradients on "
        f"{device_type!r}; give it a communication hook"
        for pair in pairs
    ]
    if lines:
        _warn(_text(lines, f"torch's device {device_type!r}"))


def report_measured(layer: RuleLayer) -> None:
    """Reports the rules of a plan that was measured for one program, once, when a region with it closes."""
    if layer in _asked and layer not in _measured:
        _measured.add(layer)
        report_unmatched(layer, strict=False)


_measured: set[RuleLayer] = set()


def _warn(text: str) -> None:
    events.warn(text, RuleWarning)


def _text(lines: list[str], program: str) -> str:
    many = "this rule has" if len(lines) == 1 else "these rules have"
    return f"{many} no effect on {program}:\n  " + "\n  ".join(lines)
