"""Which engine runs torch operations on XLA, and what it promises."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import forked
import pytest

from xla_amp.engines import base
from xla_amp.errors import EngineError

HAS_TORCH_XLA = find_spec("torch_xla") is not None


@pytest.mark.parametrize("value", ["jax"] if HAS_TORCH_XLA else ["", "auto", "jax"])
def test_the_lazy_device_is_chosen(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("XLA_AMP_ENGINE", value)
    engine = base.select()
    assert isinstance(engine, base.Engine)
    assert engine.DEVICE_TYPE == "jax"


@pytest.mark.skipif(HAS_TORCH_XLA, reason="there is a torch_xla")
def test_torch_xla_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_AMP_ENGINE", "torch_xla")
    with pytest.raises(EngineError, match=r"XLA_AMP_ENGINE=torch_xla: torch_xla is not installed; .* to jax"):
        base.select()


BROKEN = """
import os, sys, warnings
sys.path.insert(0, sys.argv[1])
from xla_amp.engines import base
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    print(base.select().DEVICE_TYPE, base.select().DEVICE_TYPE)
print(*[warning.message for warning in told])  # once
os.environ["XLA_AMP_ENGINE"] = "torch_xla"
base.select()
"""


@pytest.mark.skipif(HAS_TORCH_XLA, reason="torch_xla cannot be imported a second time where there is a real one")
def test_torch_xla_that_was_built_for_another_torch(tmp_path: Path) -> None:
    (tmp_path / "torch_xla.py").write_text("raise ImportError('undefined symbol: _ZN5torch')")
    done = forked.run(tmp_path, program=BROKEN, status=1, XLA_AMP_ENGINE="auto")
    chosen, told = done.stdout.splitlines()
    assert chosen == "jax jax"
    assert told.count("so XLA tensors are on the lazy JAX device") == 1
    assert "EngineError: XLA_AMP_ENGINE=torch_xla: importing torch_xla failed (ImportError: undefined" in done.stderr


def test_what_users_call_goes_to_the_engine_in_use() -> None:
    engine = base.select()
    engine.device()
    base.sync(wait=True)
    assert base.metrics() == engine.metrics()
    assert base.metrics.report() == engine.metrics.report()
    assert base.processes().world_size() == 1


def test_the_contract_can_fail() -> None:
    assert not isinstance(object(), base.Engine)
