"""Which engine runs torch operations on XLA, and what it promises."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from xla_amp.backends import base
from xla_amp.errors import EngineError, PolicyError

HAS_TORCH_XLA = find_spec("torch_xla") is not None


@pytest.mark.parametrize("value", ["jax"] if HAS_TORCH_XLA else ["", "auto", "jax"])
def test_the_lazy_device_is_chosen(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("XLA_AMP_ENGINE", value)
    engine = base.select()
    assert isinstance(engine, base.Engine)
    assert engine.DEVICE_TYPE == "jax"


@pytest.fixture
def forgotten_choice() -> Iterator[None]:
    """Clears the cached answers about torch_xla before and after the test."""
    kept = (base._problem_of_torch_xla, base._finds_torch_xla)
    for function in kept:
        function.cache_clear()
    yield
    for function in kept:
        function.cache_clear()


@pytest.fixture
def no_torch_xla(monkeypatch: pytest.MonkeyPatch, forgotten_choice: None) -> None:
    monkeypatch.setattr(base, "find_spec", lambda name: None)


@pytest.fixture
def broken_torch_xla(monkeypatch: pytest.MonkeyPatch, forgotten_choice: None, tmp_path: Path) -> None:
    """A torch_xla that was built for another torch."""
    (tmp_path / "torch_xla.py").write_text("raise ImportError('undefined symbol: _ZN5torch')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch_xla", raising=False)


@pytest.mark.usefixtures("no_torch_xla")
def test_torch_xla_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_AMP_ENGINE", "torch_xla")
    with pytest.raises(EngineError, match=r"XLA_AMP_ENGINE=torch_xla: torch_xla is not installed; .* to jax"):
        base.select()
    monkeypatch.setenv("XLA_AMP_ENGINE", "auto")
    assert base.select().DEVICE_TYPE == "jax"


@pytest.mark.usefixtures("broken_torch_xla")
@pytest.mark.skipif(HAS_TORCH_XLA, reason="torch_xla cannot be imported a second time where there is a real one")
def test_torch_xla_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_AMP_ENGINE", "torch_xla")
    with pytest.raises(EngineError, match=r"importing torch_xla failed \(ImportError: undefined symbol"):
        base.select()
    monkeypatch.setenv("XLA_AMP_ENGINE", "auto")
    with pytest.warns(UserWarning, match="so XLA tensors are on the lazy JAX device"):
        assert base.select().DEVICE_TYPE == "jax"
    assert base.select().DEVICE_TYPE == "jax"  # said once


def test_what_users_call_goes_to_the_engine_in_use() -> None:
    engine = base.select()
    engine.device()
    base.sync(wait=True)
    assert base.metrics() == engine.metrics()
    assert base.metrics.report() == engine.metrics.report()
    assert base.processes().world_size() == 1


def test_an_engine_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_AMP_ENGINE", "tpu")
    with pytest.raises(PolicyError, match="XLA_AMP_ENGINE='tpu': expected one of auto, torch_xla, jax"):
        base.select()


def test_the_contract_can_fail() -> None:
    assert not isinstance(object(), base.Engine)
