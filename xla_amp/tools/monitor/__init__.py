"""`monitor`: numbers of a training run, computed on the device; the first bad step is kept for `find_overflow`."""

from xla_amp.common import renamed as _renamed


def __getattr__(name: str) -> object:
    raise _renamed.missing(__name__, name, ("history", "on_jax", "on_pytorch", "sinks"))
