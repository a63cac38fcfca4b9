"""Policies: which dtype an operation computes in, and why.

`load` reads a policy, `resolve` adds what file, environment and overrides say, `Policy.decide` answers for one
operation.  Rules are data (``tables/*.toml``); docs/policy.md shows the format.
"""

from typing import TYPE_CHECKING

from xla_amp import public_names as _names
from xla_amp.policy.load import BUILTIN as BUILTIN
from xla_amp.policy.load import DEFAULT as DEFAULT
from xla_amp.policy.load import PolicyLike as PolicyLike
from xla_amp.policy.load import load as load
from xla_amp.policy.op_catalog import equivalent as equivalent
from xla_amp.policy.op_catalog import operation_class as operation_class
from xla_amp.policy.policy import Decision as Decision
from xla_amp.policy.policy import Policy as Policy
from xla_amp.policy.policy import Rule as Rule
from xla_amp.policy.resolve import override as override
from xla_amp.policy.resolve import resolve as resolve
from xla_amp.policy.resolve import unused_rules as unused_rules

__all__ = [
    "BUILTIN",
    "DEFAULT",
    "Decision",
    "Policy",
    "PolicyLike",
    "Rule",
    "equivalent",
    "load",
    "operation_class",
    "override",
    "resolve",
    "unused_rules",
]

if not TYPE_CHECKING:  # hidden from type checkers, which would otherwise accept any name

    def __getattr__(name: str) -> object:
        raise _names.missing(__name__, name, __all__)
