"""Tables and charts of `xla_amp.stablehlo.inspect` results: one module, or before and after a conversion."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from xla_amp.cli.documents import Bar, Chart, Table, dtype_kind, size, time
from xla_amp.stablehlo.tools.inspection import Inspection
from xla_amp.stablehlo.tools.targets import Compiled

_Key = TypeVar("_Key")

States = Mapping[str, Inspection]
"""Column title -> inspection: ``{"": ...}`` for one module, ``{"before": ..., "after": ...}`` for a conversion."""


def by_dtype(states: States) -> Table:
    """Operations and the bytes of their results, by dtype."""
    dtypes = _keys(found.dtypes for found in states.values())
    columns, rows, names = ["dtype"], [[dtype] for dtype in dtypes], []
    for state, found in states.items():
        names += [_title("operations", state), _title("bytes", state)]
        for row, dtype in zip(rows, dtypes, strict=True):
            tally = found.dtypes.get(dtype)
            row += [str(tally.number), size(tally.bytes)] if tally else ["0", "0 B"]
    return Table("Operations by dtype of their result", (*columns, *names), rows, names)


def contractions(states: States) -> Table:
    """Products and convolutions by operand dtypes."""
    kinds = _keys(found.contractions for found in states.values())
    names = [_title("count", state) for state in states]
    rows = [
        [f"{left} x {right} -> {result}", *(str(found.contractions.get(kind, 0)) for found in states.values())]
        for kind in kinds
        for left, right, result in [kind]
    ]
    return Table("Contractions", ("operands and result", *names), rows, names)


def casts(states: States) -> Table:
    """Conversions between dtypes."""
    kinds = _keys(found.casts for found in states.values())
    rows: list[list[str]] = [[f"{before} -> {after}"] for before, after in kinds]
    names: list[str] = []
    for state, found in states.items():
        names += [_title("count", state), _title("bytes", state)]
        for row, kind in zip(rows, kinds, strict=True):
            tally = found.casts.get(kind)
            row += [str(tally.number), size(tally.bytes)] if tally else ["0", "0 B"]
    return Table("Casts", ("from and to", *names), rows, names)


def operations(found: Inspection, most: int) -> Table:
    """Operations by name, most frequent first."""
    rows = [
        [name, str(sum(by.values())), ", ".join(f"{count} {dtype}" for dtype, count in by.items())]
        for name, by in list(found.operations.items())[:most]
    ]
    left = len(found.operations) - len(rows)
    note = f"and {left} more kinds" if left > 0 else ""
    return Table("Operations", ("operation", "count", "of result dtypes"), rows, ("count",), note)


def largest(found: Inspection) -> Table:
    """The largest values."""
    rows = [[value.type, size(value.bytes), value.name, value.function, value.location] for value in found.largest]
    return Table("Largest values", ("type", "bytes", "of", "in", "from"), rows, ("bytes",))


def targets(states: States) -> Table:
    """XLA's estimates for the modules on each target."""
    rows = []
    for target in _keys(found.targets for found in states.values()):
        for state, found in states.items():
            rows.append([target, *([state] if len(states) > 1 else []), *_estimate(found.targets.get(target, ""))])
    states_column = ("module",) if len(states) > 1 else ()
    numbers = ("estimated time", "time at bandwidth", "bytes accessed", "peak memory")
    columns = ("target", *states_column, *numbers, "contractions", "estimate by")
    return Table("Compiled by XLA (estimates; nothing was run)", columns, rows, numbers)


def _estimate(found: Compiled | str) -> list[str]:
    if isinstance(found, str):
        return ["", "", "", "", "", found.splitlines()[0] if found else ""]
    products: Counter[str] = Counter()
    for (left, right, _), count in found.contractions().items():
        products[left if left == right else f"{left} x {right}"] += count
    shown = ", ".join(f"{count} {operands}" for operands, count in products.most_common())
    return [
        time(found.seconds),
        time(found.memory_seconds),
        size(found.bytes_accessed),
        size(found.peak_memory),
        shown,
        found.seconds_why,
    ]


def charts(states: States) -> Iterator[Chart]:
    """Bytes by dtype, contractions by dtype, and estimated times."""
    yield _chart(
        "Bytes of results by dtype", states, lambda f: [(k, t.bytes, size(t.bytes)) for k, t in f.dtypes.items()]
    )
    yield _chart(
        "Contractions by dtype of their operands",
        states,
        lambda found: [(left, count, str(count)) for (left, _, _), count in found.contractions.items()],
    )
    for target in _keys(found.targets for found in states.values()):
        bars = []
        for state, found in states.items():
            compiled = found.targets.get(target)
            if isinstance(compiled, Compiled) and compiled.seconds is not None:
                kind = "low" if state == "after" else "wide"
                bars.append(Bar(state or "this module", compiled.seconds, time(compiled.seconds), kind))
        if bars:
            yield Chart(f"Estimated time on {target}", tuple(bars))


def _chart(title: str, states: States, rows: Callable[[Inspection], list[tuple[str, int, str]]]) -> Chart:
    bars = []
    for state, found in states.items():
        totals: dict[str, list[Any]] = {}
        for dtype, value, shown in rows(found):
            if dtype in totals:
                totals[dtype] = [totals[dtype][0] + value, str(totals[dtype][0] + value)]
            else:
                totals[dtype] = [value, shown]
        bars += [Bar(_title(dtype, state), value, shown, dtype_kind(dtype)) for dtype, (value, shown) in totals.items()]
    return Chart(title, tuple(bars))


def _title(word: str, state: str) -> str:
    return f"{word} {state}".rstrip()


def _keys(mappings: Iterable[Mapping[_Key, object]]) -> list[_Key]:
    return list(dict.fromkeys(key for mapping in mappings for key in mapping))
