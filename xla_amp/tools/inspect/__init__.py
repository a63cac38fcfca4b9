"""What a StableHLO program holds and costs, comparison of two, compilers for absent hardware."""

from xla_amp.common import renamed as _renamed


def __getattr__(name: str) -> object:
    raise _renamed.missing(__name__, name, ("comparison", "conversion", "inspection"))
