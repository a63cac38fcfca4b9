"""Catalogue of operations that rules may name.

It has ATen names with overloads and classes, and what means the same in a jaxpr and in StableHLO.  The catalogue
(``tables/classes.toml``) lists overloads, so ``softmax`` in a user's rule reaches ``softmax.int`` without importing
torch.  A front that knows more names subscribes to `registered_operations`.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
import importlib.resources
import itertools
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

from xla_amp.common import events
from xla_amp.common.types import OPERATION_CLASSES, Cast, OperationClass
from xla_amp.errors import PolicyError

Vocabulary: TypeAlias = Literal["jaxpr", "stablehlo"]

CLASS: Final = "class:"
"""Prefix of an operation class in a rule."""

WHILE_LOOP: Final = "while_loop"
"""Name in rules of a loop of JAX or StableHLO, whose end may depend on floats that it computes: with ``fp32`` all in it
stays float32, with ``low`` each operation in it follows its own rule."""

NO_OPERATIONS: Final = frozenset({WHILE_LOOP})
"""Names in rules of what is no ATen operation."""

_GLOB = re.compile(r"[*?\[]")


class Catalogue(NamedTuple):
    """``tables/classes.toml`` as mappings."""

    classes: Mapping[str, OperationClass]
    """Exact ATen name -> class."""
    why: Mapping[OperationClass, str]
    names: Mapping[Vocabulary, Mapping[str, str]]
    """Primitive, or StableHLO operation without the dialect -> ATen name whose rule decides it."""
    same: Mapping[str, tuple[str, ...]]
    """ATen name -> ATen names that jaxpr and StableHLO write as the same operation: a user's rule for one of them
    reaches it there, too."""
    composites: Mapping[str, tuple[str, str]]
    """Function of JAX or of a library of layers -> ATen operation, and the file that it is in; empty for any."""
    fp32_inside: frozenset[str]
    """ATen names that the cast ``fp32_inside`` can be for."""
    fp32_inside_why: str
    may_be_low: frozenset[str]
    """ATen names that JAX and StableHLO compute in the dtypes of their operands where no rule decides; what else
    computes is float32 there."""
    may_be_low_why: str
    spellings: Mapping[str, tuple[str, ...]]
    """Name in Python or in documentation -> ATen names."""
    no_rule: frozenset[str]
    """Packets that no user's rule can reach: views and conversions."""
    no_rule_why: str
    torch: Mapping[str, str]
    """ATen name -> versions of torch that have it (``"<2.14"``), if not every supported one."""


def read_table(name: str) -> str:
    """Text of the built-in table file ``tables/<name>.toml``."""
    return importlib.resources.files(__package__).joinpath("tables", f"{name}.toml").read_text(encoding="utf-8")


@functools.cache
def catalogue() -> Catalogue:
    """The shipped catalogue, read once."""
    data: dict[str, Any] = tomllib.loads(read_table("classes"))
    classes: dict[str, OperationClass] = {}
    why: dict[OperationClass, str] = {}
    names: dict[Vocabulary, dict[str, str]] = {vocabulary: {} for vocabulary in get_args(Vocabulary)}
    for row in data["class"]:
        name: OperationClass = row["name"]
        if name not in OPERATION_CLASSES or name in why:
            raise PolicyError(f"tables/classes.toml: class {name!r} is unknown or written twice")
        why[name] = row["why"]
        for operation in row["operations"]:
            if operation in classes:
                raise PolicyError(f"tables/classes.toml: {operation!r} is in classes {classes[operation]!r}, {name!r}")
            classes[operation] = name
        for vocabulary, table in names.items():
            table.update(row.get(vocabulary, {}))
    return Catalogue(
        classes=MappingProxyType(classes),
        why=MappingProxyType(why),
        names=MappingProxyType(names),
        same=MappingProxyType({operation: tuple(names) for operation, names in data["same"].items()}),
        composites=MappingProxyType(_functions(data["composites"])),
        fp32_inside=frozenset(data["fp32_inside"]["operations"]),
        fp32_inside_why=data["fp32_inside"]["why"],
        may_be_low=frozenset(data["may_be_low"]["operations"]),
        may_be_low_why=data["may_be_low"]["why"],
        spellings=MappingProxyType({spelling: tuple(names) for spelling, names in data["spellings"].items()}),
        no_rule=frozenset(data["no_rule"]["operations"]),
        no_rule_why=data["no_rule"]["why"],
        torch=MappingProxyType({name: versions for versions, names in data["torch"].items() for name in names}),
    )


def _functions(rows: Mapping[str, list[str]]) -> dict[str, tuple[str, str]]:
    found: dict[str, tuple[str, str]] = {}
    for operation, written in rows.items():
        for each in written:
            file, _, function = each.rpartition(":")
            found[function] = (operation, file)
    return found


def composite(function: str, file: str) -> str:
    """ATen operation whose parts a function writes; empty for other functions.

    The function is one of JAX or of a library of layers, or ``aten::_softmax``, the lowering of an operation in a
    program from torch.

    Example:
        >>> composite("LayerNorm.__call__", "flax/linen/normalization.py")
        'layer_norm'
    """
    if function.startswith("aten::"):
        bare = packet(function.removeprefix("aten::").removeprefix("_").removeprefix("native_"))
        return next((name for name, _ in catalogue().composites.values() if packet(name) == bare), "")
    operation, written_in = catalogue().composites.get(function, ("", ""))
    return operation if file.endswith(written_in) else ""


def operation_class(operation: str) -> OperationClass | None:
    """Class of an ATen operation; an overload that the catalogue lacks has the class of its packet.

    Example:
        >>> operation_class("softmax.int")
        'normalization'
    """
    classes = catalogue().classes
    found = classes.get(operation)
    if found is None:
        siblings = _packets().get(packet(operation), ())
        found = next((classes[name] for name in siblings if name in classes), None)
    return found


def is_contraction(operation: str) -> bool:
    """Whether an ATen operation is a matrix product, a convolution or a recurrent cell."""
    return operation_class(operation) in ("contraction", "convolution", "recurrent")


def equivalent(vocabulary: Vocabulary, name: str) -> str | None:
    """ATen name whose rule decides the operation `name` of another vocabulary; None where none corresponds.

    Example:
        >>> equivalent("stablehlo", "dot_general")
        'matmul'
    """
    return catalogue().names[vocabulary].get(name)


def meanings(vocabulary: Vocabulary, name: str) -> tuple[str, ...]:
    """ATen names that an operation of another vocabulary stands for; the first is `equivalent`'s.

    Example:
        >>> meanings("stablehlo", "logistic")
        ('sigmoid', 'special_expit')
    """
    found = equivalent(vocabulary, name)
    return () if found is None else same_as(found)


def same_as(operation: str) -> tuple[str, ...]:
    """An ATen operation, and those that jaxpr and StableHLO write as the same operation."""
    return (operation, *catalogue().same.get(operation, ()))


@functools.lru_cache(maxsize=1024)
def native(name: str) -> tuple[str, ...]:
    """ATen names that a name of jaxpr or StableHLO (``dot_general``, ``stablehlo.exponential``) stands for in a rule.

    A name that is also an ATen name means the ATen operation, with what it stands for elsewhere if that is the same
    operation: ``convolution`` means ``conv2d`` as well, but ``max``, jaxpr's elementwise maximum, is ATen's reduction.
    """
    found = [each for each in _meant(name) if packet(each) not in catalogue().no_rule]
    if name in _packets():
        return tuple(found) if found and found[0] == name else ()
    return tuple(found)


def _meant(name: str) -> list[str]:
    bare = name.removeprefix("stablehlo.")
    found: list[str] = []
    for vocabulary, table in catalogue().names.items():
        narrowed = [other for other in table if other == bare or other.startswith(f"{bare}.")]
        found += (each for other in narrowed for each in meanings(vocabulary, other))
    return list(dict.fromkeys(found))


def unfit(operations: Iterable[str], cast: Cast) -> str:
    """Why `operations`, exact names that one pattern reaches, cannot have the cast; empty if they can."""
    operations = tuple(operations)
    if cast == "fp32_inside":
        wrong = sorted(set(operations) - catalogue().fp32_inside)
        why = catalogue().fp32_inside_why
    elif cast == "low_fp32_out":
        wrong = sorted(name for name in operations if operation_class(name) not in ("contraction", "convolution"))
        why = "it is for matrix products and convolutions, which sum products of low operands in float32"
    elif WHILE_LOOP in operations and cast not in ("fp32", "low"):
        wrong, why = [WHILE_LOOP], "what a loop computes stays float32, or follows its own rules ('low')"
    else:
        return ""
    if not wrong:
        return ""
    listed = ", ".join(wrong[:3]) + (", ..." if len(wrong) > 3 else "")
    return f"cast {cast!r} for {listed}: {why}. Give it 'fp32' or 'low'"


def packet(operation: str) -> str:
    """Name without the overload: ``softmax`` of ``softmax.int``."""
    return operation.partition(".")[0]


def is_glob(pattern: str) -> bool:
    """Whether `pattern` stands for several packets: it has a wildcard or is ``class:<operation class>``."""
    return pattern.startswith(CLASS) or _GLOB.search(pattern) is not None


@functools.lru_cache(maxsize=1024)
def glob(pattern: str) -> re.Pattern[str]:
    """`pattern` compiled; ``match`` it against the name with and without its overload."""
    return re.compile(fnmatch.translate(pattern))


def fits(pattern: str, operation: str) -> bool:
    """Whether the glob or class `pattern` reaches `operation`, an exact name of the catalogue."""
    if pattern.startswith(CLASS):
        return catalogue().classes[operation] == pattern.removeprefix(CLASS)
    match = glob(pattern).match
    return match(operation) is not None or match(packet(operation)) is not None


@events.Point
def registered_operations() -> Iterable[str]:  # type: ignore[empty-body]
    """Names that a front knows beyond the catalogue, with or without ``aten::``, such as all that torch registers.

    Asked for once, when a rule names an operation that the catalogue lacks: listing them takes milliseconds.  In-place,
    ``out=`` and backward forms are left out: they never autocast.
    """


def known_operations() -> frozenset[str]:
    """All names that a rule may use (namespaced names of other libraries aside)."""
    return _registered(registered_operations.listeners).union(catalogue().classes)


@functools.lru_cache(maxsize=8)
def _registered(listeners: tuple[Callable[[], Iterable[str]], ...]) -> frozenset[str]:
    names = (canonical(name) for listener in listeners for name in listener())
    return frozenset(name for name in names if _may_autocast(name))


@functools.cache
def _packets() -> Mapping[str, tuple[str, ...]]:
    """The packets of the catalogue and their overloads."""
    return {bare: tuple(names) for bare, names in itertools.groupby(sorted(catalogue().classes), packet)}


def _may_autocast(operation: str) -> bool:
    name, _, overload = operation.partition(".")
    in_place = name.endswith("_") and not name.endswith("__")
    return not (in_place or "out" in overload.split("_") or overload.endswith("out") or "backward" in name)


def canonical(name: str) -> str:
    """`name` without ``aten::`` and without torch's ``.default``."""
    return name.strip().removeprefix("aten::").removesuffix(".default")


def matching(pattern: str) -> tuple[str, ...]:
    """Known operations that `pattern` reaches, sorted; empty when there are none.

    Args:
        pattern: an exact name (``softmax.int``), a packet (``softmax``: all its overloads), a glob or a class
            (``linalg_*``, ``class:reduction``: the catalogue's operations only) or a namespaced name of another
            library (``mylib::attention``: itself, unchecked); or a name of jaxpr or StableHLO (`native`).
    """
    found = (*_matching(pattern), *(() if is_glob(pattern) else native(pattern)))
    return tuple(sorted(set(found or _beyond(pattern))))


def overloads(name: str) -> tuple[str, ...]:
    """Operations of a packet, such as ``("pow.Scalar", ...)`` for ``"pow"``; empty for a name that is an operation.

    Raises:
        PolicyError: there is no operation of that name.
    """
    tables = catalogue()
    if name in tables.classes or name in NO_OPERATIONS or packet(name) in tables.no_rule or "::" in name:
        return ()
    found = matching(name)
    if not found and not native(name) and _may_autocast(name):
        raise PolicyError(unknown(name))
    return () if name in found else found


def named(pattern: str) -> tuple[str, ...]:
    """The operation that a name of jaxpr or StableHLO is; for other patterns all that they reach."""
    return native(pattern)[:1] or matching(pattern)


def catalogued(name: str) -> tuple[str, ...]:
    """Operations of the catalogue that an exact name or a packet means; a namespaced name means itself."""
    if name in NO_OPERATIONS or "::" in packet(name) or (name in catalogue().classes and "." in name):
        return (name,)
    return () if name in catalogue().no_rule else _packets().get(name, ())


def _matching(pattern: str) -> tuple[str, ...]:
    excluded = catalogue().no_rule
    if is_glob(pattern):
        return tuple(sorted(n for n in catalogue().classes if fits(pattern, n) and packet(n) not in excluded))
    if packet(pattern) in excluded:
        return ()
    if pattern in NO_OPERATIONS:
        return (pattern,)
    if "::" in pattern:
        # Names of other libraries are not checked; `unused_rules` lists those that never match.
        return (pattern,) if all(pattern.split("::")) else ()
    if "." in pattern and pattern in catalogue().classes:
        return (pattern,)
    return _packets().get(pattern, ())


def _beyond(pattern: str) -> list[str]:
    """Registered operations that a name means which the catalogue lacks.

    Of a packet in the catalogue only catalogued overloads: a name alone does not show that `topk.values` writes to its
    arguments.
    """
    if is_glob(pattern) or packet(pattern) in catalogue().no_rule:
        return []
    return [name for name in known_operations() if pattern in (name, packet(name))]


def unknown(pattern: str) -> str:
    """Error text for a name that reaches no operation, with the nearest names."""
    catalogued = catalogue()
    if not pattern.removesuffix("::"):
        return "a rule without a name; write the operation, e.g. 'softmax'"
    if written := _other_form(pattern):
        return f"unknown operation {pattern!r}: {written}"
    if pattern.startswith(CLASS):
        near = difflib.get_close_matches(pattern.removeprefix(CLASS), OPERATION_CLASSES, n=1, cutoff=0.4)
        hint = f"; did you mean {CLASS + near[0]!r}?" if near else "."
        return f"unknown operation class {pattern!r}{hint} Classes: {', '.join(OPERATION_CLASSES)}"
    if spelled := catalogued.spellings.get(pattern):
        return f"unknown operation {pattern!r}: its ATen name is {' or '.join(spelled)}"
    if packet(pattern) in catalogued.no_rule or (_meant(pattern) and not native(pattern)):
        return f"operation {pattern!r} takes no rule: {catalogued.no_rule_why}. Name the operation that computes"
    if not is_glob(pattern) and not _may_autocast(pattern):
        return f"operation {pattern!r} never autocasts: only out-of-place forward operations do, e.g. 'add'"
    if is_glob(pattern):
        return f"unknown operation {pattern!r}: no operation matches it (a glob of *, ? and [...], e.g. 'linalg_*')"
    names = known_operations().union(
        map(packet, known_operations()), catalogued.spellings, NO_OPERATIONS, *catalogued.names.values()
    )
    close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.6)
    hint = f"; nearest: {', '.join(close)}" if close else ""
    return (
        f"unknown operation {pattern!r}{hint} (ATen names, e.g. 'softmax', 'pow.Tensor_Scalar', 'linalg_*', or names "
        f"of JAX and StableHLO, e.g. 'dot_general'); a module of that name is {'*/' + pattern.replace('.', '/')!r}"
    )


_LIBRARIES: Final = ("torch", "nn", "F", "jax", "jnp", "lax", "np")


def _other_form(pattern: str) -> str:
    """What to write instead of several names, a whole rule, or a function with its library; empty for other names."""
    for separator in (",", ";"):
        if separator in pattern:
            parts = [part.strip() for part in pattern.split(separator) if part.strip()]
            return f"it holds several names; write a rule for each: {', '.join(map(repr, parts))}"
    operation, equals, cast = (part.strip() for part in pattern.partition("="))
    if equals:
        return f"it holds a whole rule; write the name and the cast apart, {{{operation!r}: {cast!r}}}"
    if "::" in pattern:
        return "write namespace and name of the operator, e.g. 'mylib::attention'"
    library, _, name = pattern.rpartition(".")
    if library.partition(".")[0] in _LIBRARIES:
        meant = catalogue().spellings.get(name) or ((name,) if _matching(name) or native(name) else ())
        return f"write it without the library, {' or '.join(map(repr, meant))}" if meant else ""
    return ""
