"""Runs the folder's tests on a mesh: ``JAX_FRONT_MESH=explicit pytest tests/jax_front``.

The mesh has 2 x 2 virtual CPU devices; "explicit", "auto" and "mixed" are the types of its axes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

MESH = os.environ.get("JAX_FRONT_MESH", "")
if MESH:
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"

OWN_MESH = "it has a mesh of its own, or none"
NOT_IN_JAX = "without autocast it fails, too, on such a mesh"
ONE_DEVICE = "it expects what JAX does without a mesh"
LEFT_OUT = {
    "test_a_function_of_jit_has_its_methods": ONE_DEVICE,
    "test_a_kernel_runs_as_it_was_written[<lambda>-float32_2]": NOT_IN_JAX,
    "test_eager_calls_of_a_jit_function_are_traced_once": ONE_DEVICE,
    "test_effects_keep_their_order": NOT_IN_JAX,
    "test_every_contraction_is_low[flash_attention]": NOT_IN_JAX,
    "test_every_contraction_is_low[pmap]": OWN_MESH,
    "test_every_contraction_is_low[ragged]": NOT_IN_JAX,
    "test_every_contraction_is_low[shard_map]": OWN_MESH,
    "test_gradients_are_reduced_in_float32_unless_a_dtype_is_given": OWN_MESH,
    "test_rules_with_symbolic_zeros[checkpointed_loop]": NOT_IN_JAX,
    "test_rules_with_symbolic_zeros[diffrax_solve]": NOT_IN_JAX,
    "test_the_form_is_that_of_the_platform_it_is_lowered_for": ONE_DEVICE,
    "test_values_are_close_to_float64_and_dtypes_are_kept[flash_attention]": NOT_IN_JAX,
    "test_values_are_close_to_float64_and_dtypes_are_kept[pmap]": OWN_MESH,
    "test_values_are_close_to_float64_and_dtypes_are_kept[ragged]": NOT_IN_JAX,
    "test_values_are_close_to_float64_and_dtypes_are_kept[shard_map]": OWN_MESH,
}
"""Test -> why it does not run on a mesh with explicit axes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out what does not run on the mesh."""
    for item in items if MESH else ():
        if item.name in LEFT_OUT:
            item.add_marker(pytest.mark.skip(reason=LEFT_OUT[item.name]))


@pytest.fixture(autouse=True)
def _mesh() -> Iterator[None]:
    if not MESH:
        yield
        return
    import jax
    from jax.sharding import AxisType

    explicit, auto = AxisType.Explicit, AxisType.Auto
    types = {"explicit": (explicit, explicit), "auto": (auto, auto), "mixed": (explicit, auto)}[MESH]
    with jax.set_mesh(jax.make_mesh((2, 2), ("data", "model"), axis_types=types)):
        yield
