"""Rules for classes of operations and for modules."""

from __future__ import annotations

import pytest

from xla_amp.errors import PolicyError
from xla_amp.policy import effects, load, module_patterns, op_catalog, override, resolve, unused_rules

# pattern, module path (None: outside of any), operation, whether the pattern means it
PLACES = [
    ("*.attention.softmax", "h.0.attention", "softmax.int", True),
    ("*.attention.softmax", "attention", "softmax.int", True),  # at the top no dot precedes it
    ("*.attention.softmax", "h.0.attention.core", "softmax.int", True),
    ("*.attention.softmax", "h.0.attention.softmax", "exp", True),  # a module of that name
    ("*.attention.softmax", "h.0.attention", "exp", False),
    ("*.attention.softmax", "h.0.mlp", "softmax.int", False),
    ("*.attention.softmax", "", "softmax.int", False),
    ("*.attention.softmax.int", "h.0.attention", "softmax.int", True),
    ("*.attention.pow.Scalar", "h.0.attention", "pow.Tensor_Scalar", False),
    ("*.attention", "h.0.attention", "linear", True),
    ("*.attention", "h.0.attention.query", "linear", True),
    ("*.attention", "h.0.attention_norm", "layer_norm", False),
    ("*.attention", "h.0.attention", "cat", False),  # moves values: only a rule that names it
    ("*.attention.cat", "h.0.attention", "cat", True),
    ("*.attention.reshape", "h.0.attention", "reshape", False),  # takes no rule
    ("attention", "h.attention", "linear", False),
    ("h.[01].*", "h.1.mlp", "linear", True),
    ("h.[01].*", "h.2.mlp", "linear", False),
    ("*.softmax", "", "softmax.int", True),
    ("*", "", "linear", True),
    ("*.head.mylib::attention", "head", "mylib::attention", True),
    ("*.head", "head", "mylib::attention", False),
]


@pytest.mark.parametrize(("pattern", "path", "operation", "meant"), PLACES)
def test_what_a_pattern_means(pattern, path, operation, meant):
    assert module_patterns.reaches(f"module:{pattern}", operation, path) is meant
    with override({f"module:{pattern}": "ban"}):
        effective = resolve("tpu")
        assert effective.by_module
        decision = effective.decide(operation, path)
        assert (decision.cast == "ban") is meant
        assert (decision.layer == "override") is meant
        assert effective.decide(operation) == load("tpu").decide(operation), "outside modules nothing changes"
        if meant:
            assert operation in effective.ruled_in_modules()
            assert decision.rule is not None
            effects.asked(effective, operation, path)
            assert unused_rules("tpu") == ()


def test_modules_rank_inside_their_layer_only():
    both = {"softmax": "low", "module:*.attention": "promote"}
    with override(both):
        effective = resolve("tpu")
        assert effective.decide("softmax.int", "attention").cast == "promote"
        assert effective.decide("softmax.int", "mlp").cast == "low"
        with override(softmax="keep"):
            assert resolve("tpu").decide("softmax.int", "attention").cast == "keep"


def test_two_modules_that_disagree():
    with override({"module:*.attention": "low", "module:*.attention.softmax": "fp32"}):
        assert resolve("tpu").decide("linear", "attention").cast == "low"
        with pytest.raises(PolicyError, match=r"in module 'attention' is reached by rules of one layer that disagree"):
            resolve("tpu").decide("softmax.int", "attention")


def test_the_inner_of_two_plain_paths_wins():
    with override({"module:decoder.linear": "fp32", "module:decoder.head.linear": "low", "module:decoder": "fp32"}):
        effective = resolve("tpu")
        assert effective.decide("linear", "decoder.head.out").cast == "low"
        assert effective.decide("linear", "decoder.body").cast == "fp32"
        assert effective.decide("matmul", "decoder.head").cast == "fp32"


def test_every_layer_can_name_modules_and_classes(monkeypatch, tmp_path):
    own = tmp_path / "own.toml"
    own.write_text('extends = "cpu"\n[[rule]]\noperations = ["module:head", "class:fourier"]\ncast = "keep"\n')
    assert load(own).decide("linear", "head.out").cast == "keep"
    assert load(own).decide("fft_fft").cast == "keep"
    assert load(own).decide("linear", "body").cast == "low"
    monkeypatch.setenv("XLA_AMP_RULES", "module:head.linear=fp32;class:loss=promote")
    assert resolve(own).decide("linear", "head").layer == "environment"
    assert resolve(own).decide("matmul", "head").cast == "keep"
    assert resolve(own).decide("mse_loss").cast == "promote"


def test_a_class_reaches_its_operations():
    with override({"class:reduction": "fp32"}):
        effective = resolve("cpu")
    members = {name for name, kind in op_catalog.catalogue().classes.items() if kind == "reduction"}
    assert {name for name in members if effective.decide(name).layer == "override"} == members
    assert effective.decide("linear") == load("cpu").decide("linear")
    assert not effective.by_module


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
