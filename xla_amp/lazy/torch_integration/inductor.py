"""What inductor, the default backend of `torch.compile`, finds on the device module instead of a code generator."""

from __future__ import annotations

from typing import Any, NoReturn

from xla_amp.errors import EngineError


def _refuse() -> NoReturn:
    raise EngineError(
        "torch.compile: inductor, its default backend, generates no code for the device 'jax'. Write "
        "torch.compile(model, backend='xla_amp')"
    )


class _Refusing(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse()

    def __call__(cls, *_: Any, **__: Any) -> Any:
        _refuse()


class NoCodeGenerator(metaclass=_Refusing):
    """Raises where inductor begins to use it; the message names the backend that compiles for the device."""
