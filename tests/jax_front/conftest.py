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

ANY, EXPLICIT, ONLY_EXPLICIT = ("auto", "explicit", "mixed"), ("explicit", "mixed"), ("explicit",)
OWN_MESH = "it makes its mesh itself, or has none"
NOT_IN_JAX = "without autocast it fails, too, on such a mesh"
ONE_DEVICE = "it counts what JAX and XLA do without a mesh"
LEFT_OUT = {
    "test_a_kernel_runs_as_it_was_written[<lambda>-float32_2]": (EXPLICIT, NOT_IN_JAX),
    "test_a_collective_follows_its_data_and_gradients_stay_float32": (ANY, OWN_MESH),
    "test_effects_keep_their_order": (ANY, NOT_IN_JAX),
    "test_every_contraction_is_low[flash_attention]": (EXPLICIT, NOT_IN_JAX),
    "test_every_contraction_is_low[pmap]": (ANY, OWN_MESH),
    "test_every_contraction_is_low[ragged]": (EXPLICIT, NOT_IN_JAX),
    "test_every_contraction_is_low[shard_map]": (ANY, OWN_MESH),
    "test_gradients_are_reduced_in_float32_unless_a_dtype_is_given": (ANY, OWN_MESH),
    "test_no_optimizer_gets_a_conditional[cpu]": (ANY, ONE_DEVICE),
    "test_rules_with_symbolic_zeros[checkpointed_loop]": (ONLY_EXPLICIT, NOT_IN_JAX),
    "test_solvers_of_libraries": (ONLY_EXPLICIT, NOT_IN_JAX),
    "test_symbolic_sizes_are_exported": (EXPLICIT, NOT_IN_JAX),
    "test_the_form_is_that_of_the_platform_it_is_lowered_for": (ANY, ONE_DEVICE),
    "test_values_are_close_to_float64_and_dtypes_are_kept[flash_attention-grad]": (EXPLICIT, NOT_IN_JAX),
    "test_values_are_close_to_float64_and_dtypes_are_kept[pmap-grad]": (ANY, OWN_MESH),
    "test_values_are_close_to_float64_and_dtypes_are_kept[ragged-grad]": (EXPLICIT, NOT_IN_JAX),
    "test_values_are_close_to_float64_and_dtypes_are_kept[shard_map-grad]": (ANY, OWN_MESH),
    "test_what_is_found[shard_map under jit]": (ANY, OWN_MESH),
    "test_what_is_found[shard_map]": (ANY, OWN_MESH),
}
"""Test -> the meshes that it does not run on, and why."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out what does not run on the mesh."""
    for item in items:
        every_row = LEFT_OUT.get(getattr(item, "originalname", ""), ((), ""))
        meshes, reason = LEFT_OUT.get(item.name, every_row)
        if MESH in meshes:
            item.add_marker(pytest.mark.skip(reason=reason))


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
