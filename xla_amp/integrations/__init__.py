"""Training frameworks on the XLA device: one module for each, loaded only by those who name it."""

import importlib
from types import ModuleType

_MODULES = ("huggingface", "lightning", "torchmetrics", "trainer_monitor")


def __getattr__(name: str) -> ModuleType:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; modules: {', '.join(_MODULES)}")
