"""Counters of the engine: ``from xla_amp.metrics import report``; ``xla_amp.metrics()`` returns them."""

import sys

from xla_amp.engines.base import metrics

report, reset = metrics.report, metrics.reset

# The module is the object that `xla_amp.metrics` names, which is called, so importing it hides nothing.
sys.modules[__name__] = metrics  # type: ignore[assignment]
