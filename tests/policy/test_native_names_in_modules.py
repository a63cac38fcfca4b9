"""Rules for modules take the names of JAX and StableHLO, and paths leave out the subscripts of an einsum."""

from __future__ import annotations

import pytest

from xla_amp.policy import module_patterns


@pytest.mark.parametrize(
    ("pattern", "reached", "not_reached"),
    [
        ("module:a.dot_general", {"linear", "matmul", "bmm", "addmm"}, {"conv2d", "softmax.int"}),
        ("module:a.convolution", {"convolution", "conv2d", "conv_transpose2d.input"}, {"linear"}),
        ("module:a.exponential", {"exp"}, {"exp2"}),
        ("module:a.max", {"max", "max.dim"}, {"maximum"}),  # a name that ATen has means ATen's operation
    ],
)
def test_an_operation_of_another_vocabulary_in_a_module(pattern, reached, not_reached):
    assert all(module_patterns.reaches(pattern, name, "a.b") for name in reached)
    assert not any(module_patterns.reaches(pattern, name, "a.b") for name in not_reached)
    assert not any(module_patterns.reaches(pattern, name, "c") for name in reached)


@pytest.mark.parametrize(
    ("scope", "none"), [("ij,jk->ik", True), ("...a->a", True), ("eqx.nn.Linear", True), ("h", False)]
)
def test_scopes_that_are_no_places(scope, none):
    assert module_patterns.is_no_place(scope) is none
