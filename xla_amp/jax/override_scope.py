"""`xla_amp.policy.override` around and inside functions that JAX traces.

A function of `jax.jit` is traced once, and rules act while its jaxpr is evaluated.  So an override around it is part of
the key of JAX's caches.  An override inside a function under autocast would be closed by then: it raises.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import jax

from xla_amp.common import events
from xla_amp.errors import PolicyError
from xla_amp.jax import modules
from xla_amp.policy import Policy
from xla_amp.policy.policy import RuleLayer
from xla_amp.policy.resolve import overriding

_key = jax.make_user_context(())
_under_autocast = jax.make_user_context("")
"""How autocast traces; empty if it does not.  So a function of `jax.jit` that JAX has traced before is traced again
under autocast, which refuses it if it opens an override, and once more where modules open name scopes."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.open: list[tuple[RuleLayer, Any]] = []
        self.depth = 0
        """How many functions under autocast are being traced, one inside the other."""


_thread = _Thread()


@contextlib.contextmanager
def traced_here(policy: Policy | None) -> Iterator[None]:
    """The code inside is traced under autocast with `policy`; None if that is not known.

    Modules of nnx and Equinox open name scopes where rules or reports read these.
    """
    named = bool(events.decided.listeners) or (policy is not None and policy.by_module)
    _thread.depth += 1
    try:
        with _under_autocast("named" if named else "plain"), modules.named(named):
            yield
    finally:
        _thread.depth -= 1


def is_traced_here() -> bool:
    """Whether the running code is traced under autocast, so that the rules of the region around act later."""
    return _thread.depth > 0


def _override(layer: RuleLayer, opens: bool) -> None:
    if not opens:
        index = next(i for i in reversed(range(len(_thread.open))) if _thread.open[i][0] is layer)
        _thread.open.pop(index)[1].__exit__(None, None, None)
        return
    if is_traced_here():
        rules = ", ".join(f'"{operation}": "{rule.cast}"' for rule in layer.rules for operation in rule.operations)
        raise PolicyError(
            f"override({_shown(layer)}) opened inside a function under autocast: the rules act when the function has "
            "been traced and the override is closed. Open it around the call of the function under autocast, or write "
            f"autocast(part, rules={{{rules}}}) for the part of the function"
        )
    context = _key((*(each for each, _ in _thread.open), layer))
    context.__enter__()
    _thread.open.append((layer, context))


def _shown(layer: RuleLayer) -> str:
    return ", ".join(f"{operation}={rule.cast}" for rule in layer.rules for operation in rule.operations)


overriding.subscribe(_override)
