"""Gaudi's operation lists: files, named by environment variables, that replace rows of the ``hpu`` policy.

Gaudi's PyTorch bridge looks for each operation in its low list first, then in the fp32 list, then in the promote list.
A file replaces the whole default list of its cast, so it replaces that cast's rows of the table, in that order.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path
from typing import Final, TypeAlias

from xla_amp.common import config
from xla_amp.common.types import Cast
from xla_amp.policy.load import check, read_file, rule, signature
from xla_amp.policy.op_catalog import matching
from xla_amp.policy.policy import Policy, Rule, RuleLayer

TABLE: Final = "tables/hpu.toml"
"""Origin of the layer that the lists replace."""

_UNKNOWN_TO_ATEN: Final = ("iadd", "truediv")
"""In Gaudi's documented lists, hence in files made from them. No ATen operation has these names, so the bridge ignores
them too."""

_SECOND_PROMOTE_ENTRIES: Final = ("addcdiv", "div", "exp", "mul", "pow")
"""In Gaudi's promote list, which no file replaces, and also in a list of higher rank. When a file replaces the higher
list and does not name them, they are promoted."""

_File: TypeAlias = tuple[Cast, str, Path, int, int]
"""Cast, variable, and `signature` of the file."""


def layers(base: Policy) -> tuple[RuleLayer, ...]:
    """`base.layers` with the rows of the ``hpu`` table replaced by the lists that are set.

    Without a list it is `base.layers` itself.

    Raises:
        PolicyError: a file cannot be read, or names an unknown operation.
    """
    files = config.hpu_lists()
    if not files:
        return base.layers
    return _replace(base.layers, tuple((cast, variable, *signature(path)) for cast, variable, path in files))


@functools.lru_cache(maxsize=64)
def _replace(layers: tuple[RuleLayer, ...], files: tuple[_File, ...]) -> tuple[RuleLayer, ...]:
    lists = {cast: _read(cast, *file) for cast, *file in files}
    replaced: list[RuleLayer] = []
    for layer in layers:
        replaced.extend(_ranked(layer, lists) if layer.origin == TABLE else (layer,))
    return tuple(replaced)


@functools.lru_cache(maxsize=64)
def _read(cast: Cast, variable: str, path: Path, _mtime: int, _size: int) -> RuleLayer:
    """The rules of one file: one operation a line."""
    rules: list[Rule] = []
    for number, line in enumerate(read_file(path).splitlines(), 1):
        operation = line.strip()
        if operation and operation not in _UNKNOWN_TO_ATEN:
            where = f"{os.fspath(path)}:{number} ({variable})"
            rules.append(rule(where, [operation], cast, why=f"listed in the file of {variable}", source=variable))
    return check(RuleLayer(layer="environment", origin=variable, rules=tuple(rules)))


def _ranked(table: RuleLayer, lists: dict[Cast, RuleLayer]) -> list[RuleLayer]:
    """One layer for each cast, lowest rank first: the file's rules where there is a file, else the table's rows."""
    ranked: list[RuleLayer] = []
    casts: tuple[Cast, ...] = ("promote", "fp32", "low")
    for cast in casts:
        if cast not in lists:
            rows = tuple(row for row in table.rules if row.cast == cast)
            if cast == "promote":
                rows += (_second_promote_row(rows[0]),)
            ranked.append(RuleLayer(layer="builtin", origin=TABLE, rules=rows))
        elif lists[cast].rules:
            ranked.append(lists[cast])
    return ranked


def _second_promote_row(like: Rule) -> Rule:
    operations = tuple(name for packet in _SECOND_PROMOTE_ENTRIES for name in matching(packet))
    note = "Documented in two lists; the other one was replaced by a file."
    return dataclasses.replace(like, operations=operations, note=note, origin=f"{TABLE}, promote list")
