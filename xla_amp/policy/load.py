"""Read policies from TOML; the built-in tables and a user's file share one format and one reader.

Header: ``name``, ``low``, ``jax_low``, ``dtypes``, ``extends``, ``summary``, ``source``.  Rows: ``[[rule]]`` with
``operations``, ``cast``, ``why``, ``source`` and optionally ``note``.  A built-in table has all of them, sorted, with
exact names; in a user's file only ``operations`` and ``cast`` are needed (docs/policy.md).
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import itertools
import os
import re
import tomllib
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias

from xla_amp.common import config, files
from xla_amp.common.types import CASTS, LOW_DTYPES, Cast, Layer, LowDtype
from xla_amp.errors import PolicyError
from xla_amp.policy import module_patterns, op_catalog
from xla_amp.policy.policy import Policy, Rule, RuleLayer

BUILTIN: Final = ("cautious", "cpu", "cuda", "gpu", "hpu", "lean", "mps", "tpu", "xpu")
"""Names of the built-in policies."""

DEFAULT: Final = "default"
"""Where a front takes a policy: the device's own, as without one (`default_name`)."""

_HEADER: Final = ("dtypes", "extends", "jax_low", "low", "name", "source", "summary")
_ROW: Final = ("cast", "note", "operations", "source", "why")
_NARROW: Final = ("bf16", "bfloat16", "float16", "fp16", "fp8")
"""dtypes that are written in place of the cast ``low``."""

PolicyLike: TypeAlias = "str | os.PathLike[str] | Policy"


def load(policy: PolicyLike) -> Policy:
    """A policy by built-in name or from a TOML file; a `Policy` is returned as it is.

    Files are read again only when they change.

    Raises:
        PolicyError: an unknown name, or an invalid file.

    Example:
        >>> load("tpu").low
        'bfloat16'
    """
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, str | os.PathLike):
        raise PolicyError(
            f"load() expects the name of a policy, a path to a TOML file or a Policy, got {policy!r} "
            f"({type(policy).__name__})"
        )
    if policy in BUILTIN:
        return _builtin(str(policy), _lists_of(str(policy)))
    if policy == DEFAULT:
        raise PolicyError(
            "the policy 'default' is the device's own: 'tpu' on XLA:TPU and XLA:CPU, 'gpu' on XLA:GPU, torch's rules "
            "on its own devices; autocast(policy='default') finds it, here name one"
        )
    path = Path(policy).expanduser()
    if isinstance(policy, str) and path.suffix != ".toml" and path.name == policy and not path.is_file():
        close = difflib.get_close_matches(policy.lower(), BUILTIN, n=2, cutoff=0.3)
        hint = f"; nearest: {', '.join(close)}" if close else ""
        raise PolicyError(
            f"unknown policy {policy!r}{hint}. Policies: {', '.join(BUILTIN)}, or a path that ends in .toml"
        )
    return _from_file(*signature(path), _lists_of("hpu"))


_DEFAULTS = {"cpu": "tpu", "tpu": "tpu", "gpu": "gpu", "cuda": "gpu", "rocm": "gpu"}


def default_name(platform: str) -> str:
    """Policy for an XLA platform: ``tpu`` for ``cpu`` and ``tpu``, ``gpu`` for ``gpu``, ``cuda`` and ``rocm``.

    XLA:CPU has the TPU's rules: it also computes in bfloat16, and a TPU program can be tried on it.

    Raises:
        PolicyError: another platform.
    """
    try:
        return _DEFAULTS[platform.lower()]
    except (KeyError, AttributeError):
        raise PolicyError(
            f"no default policy for XLA platform {platform!r}; expected one of {', '.join(_DEFAULTS)}, or pass "
            f"policy= with one of {', '.join(BUILTIN)}"
        ) from None


def signature(path: Path) -> tuple[Path, int, int]:
    """`path`, with its modification time (ns) and size (bytes), which change when the file does.

    Raises:
        PolicyError: there is no such file.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise PolicyError(f"policy file {str(path)!r} cannot be read: {error.strerror}") from error
    return path, status.st_mtime_ns, status.st_size


_List: TypeAlias = tuple[Cast, Path, int, int]
"""A cast, and the `signature` of the file that replaces the rows of it."""


def _lists_of(name: str) -> tuple[_List, ...]:
    """Gaudi's lists of the user's own, which only the policy ``hpu`` follows."""
    return tuple((cast, *signature(path)) for cast, path in config.hpu_lists().items()) if name == "hpu" else ()


@functools.lru_cache(maxsize=64)
def _builtin(name: str, lists: tuple[_List, ...] = ()) -> Policy:
    policy = from_text(f"tables/{name}.toml", op_catalog.read_table(name), "builtin")
    return dataclasses.replace(policy, layers=_with_lists(policy.layers[0], lists)) if lists else policy


_ALSO_PROMOTED: Final = ("addcdiv", "div", "exp", "mul", "pow")
"""In Gaudi's promote list, which no file replaces, and in a list that is asked before it."""


def _with_lists(table: RuleLayer, lists: tuple[_List, ...]) -> tuple[RuleLayer, ...]:
    """The rows of Gaudi's table, those of a cast with a list replaced by it; the layer asked first is the last.

    Gaudi's bridge looks for an operation in the low list, then in the fp32 list, then in the promote list.
    """
    files = {cast: path for cast, path, *_ in lists}
    layers = []
    for cast in ("promote", "fp32", "low"):
        if cast in files:
            layers.append(_from_list(files[cast], cast))
            continue
        rows = tuple(row for row in table.rules if row.cast == cast)
        if cast == "promote":
            promoted = tuple(itertools.chain.from_iterable(map(op_catalog.matching, _ALSO_PROMOTED)))
            rows += (dataclasses.replace(rows[0], operations=promoted, note="Documented in two lists."),)
        layers.append(RuleLayer(layer="builtin", origin=table.origin, rules=rows))
    return tuple(layers)


def _from_list(path: Path, cast: Cast) -> RuleLayer:
    variable = config.HPU_LISTS[cast]
    rules: dict[tuple[str, ...], Rule] = {}  # Gaudi's own list has div, and truediv, Python's name for it
    spellings = op_catalog.catalogue().spellings
    for number, line in enumerate(read_file(path).splitlines(), 1):
        if name := line.strip():
            where = f"{path}:{number} ({variable})"
            names, why = spellings.get(name, (name,)), f"listed in the file of {variable}"
            row = rule(where, names, cast, why=why, source=variable)
            rules.setdefault(row.operations, row)
    return check(RuleLayer(layer="environment", origin=variable, rules=tuple(rules.values())))


@functools.lru_cache(maxsize=64)
def _from_file(path: Path, _mtime: int, _size: int, _lists: tuple[_List, ...]) -> Policy:
    return from_text(str(path), read_file(path), "file")


@functools.lru_cache(maxsize=64)
def rules_from_file(path: Path, _mtime: int, _size: int) -> RuleLayer:
    """The rows of a file that is layered on every policy; it may not set a low dtype."""
    file = str(path)
    header, layer = _parse(file, read_file(path), "file")
    for key in ("dtypes", "extends", "jax_low", "low"):
        if key in header:
            _fail(
                file, f"{key} has no effect in a file layered on other policies; remove it, or pass the file as policy="
            )
    return layer


def read_file(path: Path) -> str:
    """Text of a file.

    Raises:
        PolicyError: it cannot be read as UTF-8 text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError(f"policy file {str(path)!r} cannot be read: {error}") from error


def _fail(where: str, problem: str) -> NoReturn:
    raise PolicyError(f"{where}: {problem}")


def from_text(file: str, text: str, layer: Layer) -> Policy:
    """The policy of a file's text; `file` opens every error message.

    Raises:
        PolicyError: the text is no policy.
    """
    header, rules = _parse(file, text, layer)
    parent = None
    if (extends := header.get("extends")) is not None:
        if extends not in BUILTIN:
            _fail(file, f"extends = {extends!r} is no built-in policy; expected one of {', '.join(BUILTIN)}")
        parent = load(extends)
    low = header.get("low", parent.low if parent else None)
    if low is None:
        _fail(file, 'low is missing: add low = "bfloat16" or low = "float16", or extends = "tpu"')
    dtypes = header.get("dtypes", parent.dtypes if parent and low in parent.dtypes else (low,))
    jax_low = header.get("jax_low", parent.jax_low if parent and "low" not in header else low)
    for key, dtype in (("low", low), ("jax_low", jax_low)):
        if dtype not in dtypes:
            _fail(file, f"{key} = {dtype!r} is not in dtypes = {list(dtypes)}; add it there")
    return Policy(
        name=header.get("name", Path(file).stem),
        low=low,
        jax_low=jax_low,
        dtypes=tuple(dtypes),
        layers=(*parent.layers, rules) if parent else (rules,),
        summary=header.get("summary", ""),
        source=header.get("source", file),
    )


def _parse(file: str, text: str, layer: Layer) -> tuple[dict[str, Any], RuleLayer]:
    try:
        data = files.parsed(tomllib.loads, text)
    except ValueError as error:
        _fail(file, f"not TOML: {error}")
    if "rules" in data:
        _fail(file, "unknown header key 'rules'; write each rule as a table under [[rule]], without the s")
    rows = data.pop("rule", [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        _fail(file, "rules must be written as tables under [[rule]], with two brackets")
    _check_header(file, data)
    lines = [number for number, line in enumerate(text.splitlines(), 1) if re.match(r"\s*\[\[\s*rule\s*]]", line)]
    if len(lines) != len(rows):  # rules written inline have no line to report, only a number
        lines = [0] * len(rows)
    rules = []
    for number, (line, row) in enumerate(zip(lines, rows, strict=True), 1):
        rules.append(_rule(f"{file}:{line} (rule {number})" if line else f"{file} (rule {number})", row, file))
    return data, check(RuleLayer(layer=layer, origin=file, rules=tuple(rules)))


def _check_header(file: str, header: dict[str, Any]) -> None:
    _check_keys(file, header, _HEADER, what="header key")
    for key in ("extends", "name", "source", "summary"):
        if key in header and not isinstance(header[key], str):
            _fail(file, f"{key} must be a string, got {header[key]!r}")
    for key in ("low", "jax_low"):
        if key in header:
            _check_dtype(file, key, header[key])
    if "dtypes" in header:
        if not isinstance(header["dtypes"], list) or not header["dtypes"]:
            _fail(file, f'dtypes must be a list, e.g. ["bfloat16"], got {header["dtypes"]!r}')
        for dtype in header["dtypes"]:
            _check_dtype(file, "dtypes", dtype)


def _check_dtype(file: str, key: str, dtype: Any) -> LowDtype:
    if dtype not in LOW_DTYPES:
        _fail(file, f"{key} names {dtype!r}; a low dtype is one of {', '.join(LOW_DTYPES)}")
    found: LowDtype = dtype
    return found


def _check_keys(where: str, given: Iterable[str], legal: Collection[str], *, what: str) -> None:
    for key in given:
        if key not in legal:
            close = difflib.get_close_matches(key, legal, n=1, cutoff=0.4)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            _fail(where, f"unknown {what} {key!r}{hint} Legal: {', '.join(legal)}")


def _rule(where: str, row: dict[str, Any], file: str) -> Rule:
    _check_keys(where, row, _ROW, what="key")
    if missing := [key for key in ("operations", "cast") if key not in row]:
        _fail(where, f"{', '.join(missing)} missing; a row has operations and cast")
    operations = row["operations"]
    if not isinstance(operations, list) or not operations or not all(isinstance(name, str) for name in operations):
        _fail(where, f'operations must be a non-empty list of names, e.g. ["softmax"], got {operations!r}')
    for key in ("why", "source", "note"):
        if not isinstance(row.get(key, ""), str):
            _fail(where, f"{key} must be a string, got {row[key]!r}")
    return rule(
        where,
        operations,
        row["cast"],
        why=row.get("why", f"asked for in {file}"),
        source=row.get("source", file),
        note=row.get("note", ""),
    )


def rule(where: str, operations: Iterable[str], cast: Any, *, why: str, source: str, note: str = "") -> Rule:
    """A rule whose cast is checked; `where` opens every error message.

    Raises:
        PolicyError: the cast is unknown.
    """
    if cast not in CASTS:
        close = ["low"] if cast in _NARROW else difflib.get_close_matches(str(cast), CASTS, n=1, cutoff=0.4)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        _fail(where, f"unknown cast {cast!r} for {', '.join(operations)}{hint} Casts: {', '.join(CASTS)}")
    return Rule(
        operations=tuple(module_patterns.spelled(op_catalog.canonical(name)) for name in operations),
        cast=cast,
        why=why,
        source=source,
        note=note,
        origin=where,
    )


def check(layer: RuleLayer) -> RuleLayer:
    """Returns `layer` after checking that each name matches an operation and that no two rules disagree.

    Raises:
        PolicyError: an unknown name, or two rules with different casts for one operation.
    """
    if layer.layer != "builtin":
        for rule in layer.rules:
            for pattern in rule.operations:
                if module_patterns.is_module_pattern(pattern):
                    if problem := module_patterns.problem(pattern, rule.cast):
                        _fail(rule.origin, problem)
                elif not op_catalog.matching(pattern):
                    _fail(rule.origin, op_catalog.unknown(pattern))
                elif problem := op_catalog.unfit(op_catalog.named(pattern), rule.cast):
                    _fail(rule.origin, problem)
        for operation in layer.reach():
            layer.find(operation)
    return layer
