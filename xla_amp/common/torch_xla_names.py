"""Errors for names of torch_xla without a counterpart, which tell what to write (``torch_xla_names.toml``)."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from xla_amp import public_names


class MissingNames(NamedTuple):
    """Names of one module, and what to write instead, in Markdown."""

    module: str
    names: Sequence[str]
    write: str


@functools.cache
def table() -> tuple[MissingNames, ...]:
    """All rows."""
    text = Path(__file__).with_suffix(".toml").read_text("utf-8")
    return tuple(MissingNames(row["module"], row["names"].split(), row["write"]) for row in tomllib.loads(text)["row"])


def missing(module: str, name: str, public: Iterable[str]) -> AttributeError:
    """The error for a name that `module` of this package does not have.

    `public` are the names that it has.
    """
    found = next((row for row in table() if name in row.names), None)
    if found is None:
        return public_names.missing(module, name, public)
    return AttributeError(f"{found.module}.{name} has no counterpart in xla_amp. Write: {found.write}")
