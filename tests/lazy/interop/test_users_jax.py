"""JAX code of the user's own beside the device: its 64-bit switch, its caches and its arrays are left alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from harness import jax_events

from xla_amp import lazy as engine
from xla_amp import lowering


def _switch() -> tuple[bool, Any, Any]:
    return jax.config.jax_enable_x64, jnp.ones(3).dtype, jnp.asarray(1).dtype


def test_the_64_bit_switch_is_left_alone(device: torch.device) -> None:
    before = _switch()
    assert before[1] == jnp.float32
    seen = []
    x = torch.arange(3).to(device).double().requires_grad_()
    assert x.dtype is torch.float64
    seen.append(_switch())
    y = (x * 0.1).sum()
    y.register_hook(lambda g: seen.append(_switch()))
    y.backward()
    seen.append(_switch())
    engine.sync()
    assert x.grad.dtype is torch.float64
    assert x.grad.tolist() == [0.1] * 3  # not rounded to float32 on the way
    seen.append(_switch())
    assert seen == [before] * 4


def test_the_64_bit_switch_survives_an_error(device: torch.device) -> None:
    library = torch.library.Library("lazy_users", "FRAGMENT")
    library.define("breaks(Tensor x) -> Tensor")
    library.impl("breaks", torch.empty_like, "Meta")
    inside = []

    @lowering.register("lazy_users::breaks", override=True)
    def breaks(x: Any) -> Any:
        inside.append(jnp.ones(1).dtype)
        raise ValueError

    kept = torch.ops.lazy_users.breaks(torch.ones(3).to(device))
    with pytest.raises(RuntimeError):
        engine.sync()
    assert set(inside) == {jnp.dtype(jnp.float64)}  # the twin: a lowering does see 64-bit types
    assert _switch()[:2] == (False, jnp.float32)
    del kept


def test_the_users_switch_builds_nothing_anew(device: torch.device) -> None:
    x = torch.ones(3, 19).to(device)

    def run() -> None:
        kept = (x * 2.5).sum(0)
        engine.sync()
        assert kept.shape == (19,)

    def built(events: list[str]) -> list[str]:
        return [event for event in events if "trace" in event or "compile" in event]

    run()
    with jax_events() as events:
        for switch in (
            jax.enable_x64(True),
            jax.enable_x64(False),
            jax.numpy_dtype_promotion("strict"),
            jax.numpy_rank_promotion("raise"),
        ):
            with switch:
                run()
        assert built(events) == []
        jax.jit(lambda x: x + 1)(1.0)
        assert built(events) != []  # the twin: JAX reports what it builds


def test_jax_random_state_and_defaults_are_left_alone(device: torch.device) -> None:
    before = {name: getattr(jax.config, name) for name in ("jax_default_prng_impl", "jax_threefry_partitionable")}
    with jax.default_prng_impl("rbg"):
        torch.manual_seed(0)
        a = torch.randn(4, device=device).tolist()
        assert jax.random.key(0).dtype == jax.random.key(1, impl="rbg").dtype
    torch.manual_seed(0)
    assert torch.randn(4, device=device).tolist() == a
    assert {name: getattr(jax.config, name) for name in before} == before
