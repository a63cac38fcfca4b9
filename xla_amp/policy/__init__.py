"""Policies: which dtype an operation computes in, and why.

`load` reads a policy, `resolve` adds what file, environment and overrides say, `Policy.decide` answers for one
operation.  Rules are data (``tables/*.toml``); docs/policy.md shows the format.
"""

from xla_amp.policy.load import BUILTIN as BUILTIN
from xla_amp.policy.load import DEFAULT as DEFAULT
from xla_amp.policy.load import PolicyLike as PolicyLike
from xla_amp.policy.load import default_name as default_name
from xla_amp.policy.load import load as load
from xla_amp.policy.op_catalog import equivalent as equivalent
from xla_amp.policy.op_catalog import extend_known_operations as extend_known_operations
from xla_amp.policy.op_catalog import operation_class as operation_class
from xla_amp.policy.policy import Decision as Decision
from xla_amp.policy.policy import Policy as Policy
from xla_amp.policy.policy import Rule as Rule
from xla_amp.policy.policy import RuleLayer as RuleLayer
from xla_amp.policy.regions import Region as Region
from xla_amp.policy.regions import Token as Token
from xla_amp.policy.regions import current as current
from xla_amp.policy.regions import on_pop as on_pop
from xla_amp.policy.regions import on_push as on_push
from xla_amp.policy.regions import pop as pop
from xla_amp.policy.regions import push as push
from xla_amp.policy.resolve import OpenRules as OpenRules
from xla_amp.policy.resolve import on_override as on_override
from xla_amp.policy.resolve import open_rules as open_rules
from xla_amp.policy.resolve import overridden as overridden
from xla_amp.policy.resolve import override as override
from xla_amp.policy.resolve import reopened as reopened
from xla_amp.policy.resolve import resolve as resolve
from xla_amp.policy.resolve import unused_rules as unused_rules
