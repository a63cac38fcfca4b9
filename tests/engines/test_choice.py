"""Which engine runs torch operations on XLA, and what it promises."""

from __future__ import annotations

import pytest

from xla_amp.engines import base
from xla_amp.errors import EngineError, PolicyError


@pytest.mark.parametrize("value", ["", "auto", "jax"])
def test_the_lazy_device_is_chosen(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("XLA_AMP_ENGINE", value)
    engine = base.select()
    assert isinstance(engine, base.Engine)
    assert engine.DEVICE_TYPE == "jax"


def test_an_engine_that_is_not_in_this_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_AMP_ENGINE", "torch_xla")
    with pytest.raises(EngineError, match=r"XLA_AMP_ENGINE=torch_xla: .*unset XLA_AMP_ENGINE"):
        base.select()


def test_an_engine_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_AMP_ENGINE", "tpu")
    with pytest.raises(PolicyError, match="XLA_AMP_ENGINE='tpu': expected one of auto, torch_xla, jax"):
        base.select()


def test_the_contract_can_fail() -> None:
    assert not isinstance(object(), base.Engine)
