"""`explain`: report the dtype decision for every operation of a block: cast, rule, inserted conversions."""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

from xla_amp import events, tables
from xla_amp.events import DecisionRecord
from xla_amp.policy.op_catalog import is_contraction
from xla_amp.precision_report import PrecisionReport, summarize

_SHORT: Final = {
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "f32",
    "float64": "f64",
    "complex64": "c64",
    "complex128": "c128",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint8": "u8",
}
_COLUMNS: Final = ("count", "operation", "module", "before", "after", "result", "cast", "layer", "rule")


class Report:
    """The operations of one `explain` block, in execution order; may be read while the block runs.

    ``print(report)`` shows a table, `rows` gives dicts, `to_json` text.
    """

    def __init__(self) -> None:
        self.records: list[DecisionRecord] = []
        """One `xla_amp.events.DecisionRecord` for each operation that ran in an autocast region, of any thread."""

    def __len__(self) -> int:
        return len(self.records)

    def rows(self) -> list[dict[str, str]]:
        """One flat dict for each operation: ``pandas.DataFrame(report.rows())``.

        Keys: operation, module, cast, layer, policy, before, after, result, casts, rule, why, source, location, front.
        Several dtypes are separated by ", "; ``casts`` lists the conversions, ``float32->bfloat16``, one per operand.
        """
        return [
            {name: value if isinstance(value, str) else ", ".join(value) for name, value in _fields(entry).items()}
            for entry in self.records
        ]

    def to_json(self, indent: int | None = None) -> str:
        """`rows` as JSON, with lists of dtypes, and the `summary`."""
        document = {"summary": self.summary(), "operations": [_fields(entry) for entry in self.records]}
        return json.dumps(document, indent=indent)

    def summary(self) -> dict[str, Any]:
        """Number of operations, in total, by cast and by layer, and number of inserted conversions by kind."""
        inserted = Counter(cast for entry in self.records for cast in _inserted(entry))
        return {
            "operations": len(self.records),
            "by_cast": dict(Counter(entry.cast for entry in self.records).most_common()),
            "by_layer": dict(Counter(entry.layer for entry in self.records).most_common()),
            "casts_inserted": dict(inserted.most_common()),
        }

    def precision(self) -> PrecisionReport:
        """What ran low: contractions, float32 islands and casts, for each module and in total."""
        return summarize(self.records, is_contraction)

    def __str__(self) -> str:
        """A table with one line per group of equal decisions, in order of first appearance."""
        return tables.plain(_COLUMNS, self._lines()) + "\n" + self._closing()

    def __rich__(self) -> Any:
        """The table for ``rich.print``."""
        return tables.rich(_COLUMNS, self._lines(), caption=self._closing())

    def _lines(self) -> list[Sequence[str]]:
        alike = Counter(
            (
                entry.operation,
                entry.module,
                _dtypes(entry.given),
                _dtypes(entry.used) if entry.used != entry.given else "",
                _dtypes(entry.result),
                entry.cast if entry.origin else "",
                entry.layer if entry.origin else "",
                entry.origin,
            )
            for entry in self.records
        )
        return [(str(count), *line) for line, count in alike.items()]

    def _closing(self) -> str:
        summary = self.summary()
        casts = ", ".join(f"{count} x {kind}" for kind, count in summary["casts_inserted"].items()) or "none"
        return f"{summary['operations']} operations; casts inserted: {casts}"


@contextlib.contextmanager
def explain() -> Iterator[Report]:
    """Reports every operation that runs in an autocast region while the block is open, on any engine and thread.

    Wrap it around a forward pass or a step; regions may open inside it or around it.  Without an open block the cost is
    one branch per operation with a rule; inside a block every operation goes through Python, and JAX traces and
    compiles again what this thread calls.

    Example:
        >>> import torch, xla_amp
        >>> with xla_amp.explain() as report, xla_amp.autocast("cpu"):
        ...     _ = torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        >>> report.rows()[0]["operation"], report.rows()[0]["result"], report.rows()[0]["layer"]
        ('mm', 'bfloat16', 'builtin')
    """
    report = Report()
    with contextlib.ExitStack() as stack:
        if "torch" in sys.modules:
            from xla_amp.pytorch.autocast import operation_recorder

            stack.callback(operation_recorder.stop, operation_recorder.start())
        if "xla_amp.jax.compat" in sys.modules:
            from xla_amp.jax import compat

            stack.enter_context(compat.retraced())  # the decisions are made while JAX traces
        sink = report.records.append
        events.add(sink)
        stack.callback(events.remove, sink)
        yield report


def _fields(entry: DecisionRecord) -> dict[str, str | list[str]]:
    return {
        "operation": entry.operation,
        "module": entry.module,
        "cast": entry.cast,
        "layer": entry.layer,
        "policy": entry.policy,
        "before": list(entry.given),
        "after": list(entry.used),
        "result": list(entry.result),
        "casts": _inserted(entry),
        "rule": entry.origin,
        "why": entry.why,
        "source": entry.source,
        "location": entry.location,
        "front": entry.front,
    }


def _inserted(entry: DecisionRecord) -> list[str]:
    return [f"{given}->{used}" for given, used in zip(entry.given, entry.used, strict=True) if given != used]


def _dtypes(names: Sequence[str]) -> str:
    return ", ".join(_SHORT.get(name, name) for name in names)
