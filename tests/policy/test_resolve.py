"""Layers: precedence, identity, the environment, overrides, unused rules."""

from __future__ import annotations

import contextlib
import os

import pytest

from xla_amp.common import config
from xla_amp.errors import PolicyError
from xla_amp.policy import effects, load, override, resolve, unused_rules
from xla_amp.policy.op_catalog import matching


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in (config.POLICY_FILE, config.RULES, *config.HPU_LISTS.values()):
        monkeypatch.delenv(name, raising=False)


def rules_file(folder, *rows, name="rules.toml"):
    path = folder / name
    path.write_text("".join(f'[[rule]]\noperations = ["{name}"]\ncast = "{cast}"\n' for name, cast in rows))
    return path


def test_nothing_on_top_is_the_policy_itself():
    assert resolve("tpu") is load("tpu")


def test_every_layer_wins_over_those_before_it(monkeypatch, tmp_path):
    """One operation per number of layers that speak of it; the highest of them must win."""
    operations = ["softmax", "log_softmax", "exp", "log", "sum"]  # all cast to float32 in the built-in table
    own = rules_file(tmp_path, *((name, "keep") for name in operations[1:]))
    monkeypatch.setenv(config.POLICY_FILE, str(own))
    monkeypatch.setenv(config.RULES, ";".join(f"{name}=low" for name in operations[2:]))
    with override(dict.fromkeys(operations[3:], "promote")):
        policy = resolve("tpu", dict.fromkeys(operations[4:], "fp32_out"))
        exact = ["softmax.int", "log_softmax.int", "exp", "log", "sum.dim_IntList"]
        decided = [policy.decide(name) for name in exact]
    assert [decision.layer for decision in decided] == ["builtin", "file", "environment", "override", "context"]
    assert [decision.cast for decision in decided] == ["fp32", "keep", "low", "promote", "fp32_out"]
    assert "rules.toml:1 (rule 1)" in decided[1].origin
    assert config.RULES in decided[2].origin
    assert "policy.override" in decided[3].origin
    assert decided[4].origin.startswith("autocast(rules=...)")
    assert resolve("tpu").decide("log").layer == "environment", "the override is gone"


def test_a_files_own_rows_rank_below_the_file_of_the_environment(monkeypatch, tmp_path):
    own = tmp_path / "own.toml"
    own.write_text('extends = "tpu"\n[[rule]]\noperations = ["exp", "log"]\ncast = "low"\n')
    monkeypatch.setenv(config.POLICY_FILE, str(rules_file(tmp_path, ("exp", "keep"))))
    policy = resolve(own)
    assert policy.name == "own"
    assert (policy.decide("exp").cast, policy.decide("log").cast) == ("keep", "low")


def test_the_same_override_can_be_entered_inside_itself_and_by_an_exception_left():
    layer = override(softmax="low")
    with layer:
        with contextlib.suppress(KeyError), layer:
            assert resolve("tpu").decide("softmax.int").cast == "low"
            raise KeyError
        assert resolve("tpu").decide("softmax.int").cast == "low"
    assert resolve("tpu") is load("tpu")


def test_equal_layers_give_the_identical_object(monkeypatch):
    monkeypatch.setenv(config.RULES, "softmax=low")
    first = resolve("tpu")
    assert resolve("tpu") is first
    monkeypatch.setenv(config.RULES, "softmax=promote")
    assert resolve("tpu") is not first
    monkeypatch.setenv(config.RULES, "softmax=low")
    assert resolve("tpu") is first
    with override(exp="low"):
        inner = resolve("tpu")
    with override({"exp": "low"}):
        assert resolve("tpu") is inner
    assert inner != first


def test_resolving_a_resolved_policy_starts_from_its_base():
    with override(exp="low"):
        effective = resolve("tpu", {"log": "low"})
        assert resolve(effective) is effective
    again = resolve(effective)
    assert again.decide("exp").cast == "fp32", "the override is closed"
    assert again.decide("log").cast == "low", "the context rules stay with the policy"
    assert again.base is load("tpu")


def test_the_effective_policy_lists_what_the_rules_added():
    with override({"gelu": "fp32", "relu": "keep", "linalg_norm": "low", "mylib::attention": "low"}):
        operations = resolve("tpu").operations()
    before = load("tpu").operations()
    assert operations - before == {"gelu", *matching("linalg_norm"), "mylib::attention"}
    assert before - operations == {"relu"}


# Environment


def test_rules_in_the_environment(monkeypatch):
    monkeypatch.setenv(config.RULES, " softmax = low ; linalg_*=promote;; sum.dim_IntList=keep;")
    policy = resolve("cuda")
    assert policy.decide("softmax.int").cast == "low"
    assert policy.decide("linalg_vecdot").cast == "promote"
    assert policy.decide("sum.dim_IntList").cast == "keep"
    assert policy.decide("sum").cast == "fp32_out"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("softmax", r"XLA_AMP_RULES, rule 1 \('softmax'\): expected operation=cast"),
        ("mm=low;=fp32", r"XLA_AMP_RULES, rule 2 \('=fp32'\): expected operation=cast"),
        ("sofmax=low", r"rule 1 .*unknown operation 'sofmax'; nearest: softmax"),
        ("exp=low;exp=fp32", r"rule 2 .*'exp' is written twice; its other row is XLA_AMP_RULES, rule 1"),
        ("exp=low;exp*=fp32", r"'exp' is reached by rules.*exp = low.*rule 1.*exp\* = fp32.*rule 2"),
        ("pow=low;pow.Scalar=fp32", r"'pow.Scalar' is reached by rules of one layer that disagree"),
    ],
)
def test_mistakes_in_the_environment(monkeypatch, text, words):
    monkeypatch.setenv(config.RULES, text)
    with pytest.raises(PolicyError, match=words):
        resolve("tpu")


def test_two_rules_that_agree_are_fine_and_an_exception_goes_into_a_later_layer(monkeypatch):
    monkeypatch.setenv(config.RULES, "exp=low;exp*=low")
    assert resolve("tpu").decide("exp").cast == "low"
    with override(exp="fp32"):
        assert resolve("tpu").decide("exp").cast == "fp32"
        assert resolve("tpu").decide("expm1").cast == "low"


def test_the_file_of_the_environment_may_only_hold_rules(monkeypatch, tmp_path):
    for line in ('extends = "gpu"', 'low = "float16"', 'jax_low = "float16"', 'dtypes = ["float16"]'):
        path = tmp_path / "policy.toml"
        path.write_text(line + "\n")
        os.utime(path, ns=(len(line), len(line)))
        monkeypatch.setenv(config.POLICY_FILE, str(path))
        with pytest.raises(PolicyError, match=rf"policy.toml: {line.split()[0]} has no effect.*pass the file as"):
            resolve("tpu")
    monkeypatch.setenv(config.POLICY_FILE, str(tmp_path / "gone.toml"))
    with pytest.raises(PolicyError, match=r"gone.toml.*cannot be read"):
        resolve("tpu")


# Gaudi's lists: the documentation's example sets both variables before anything is loaded

LOW_LIST, FP32_LIST = config.HPU_LISTS.values()


@pytest.fixture
def gaudi_list(monkeypatch, tmp_path):
    def write(variable, text):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.txt"
        path.write_text(text)
        monkeypatch.setenv(variable, str(path))
        return path

    return write


def test_gaudis_lists_replace_the_rows_of_their_cast(gaudi_list):
    low = gaudi_list(LOW_LIST, "mm\n\nexp\ntruediv\ndiv\n")
    policy = resolve("hpu")
    named = {"mm", "exp", "div.Scalar", "div.Scalar_mode", "div.Tensor", "div.Tensor_mode"}
    assert {name for name, cast in policy.casts().items() if cast == "low"} == named
    assert (policy.decide("mm").layer, policy.decide("mm").origin) == ("environment", f"{low}:1 ({LOW_LIST})")
    assert policy.decide("mul.Tensor").cast == "promote", "in two lists of the documentation, low and promote"
    assert (policy.decide("softmax.int").cast, policy.decide("log").cast) == ("keep", "fp32")
    gaudi_list(FP32_LIST, "softmax\nmm\n")
    policy = resolve("hpu")
    assert policy.decide("softmax.int").cast == "fp32"
    assert policy.decide("mm").cast == "low", "Gaudi looks into the low list first"
    assert (policy.decide("log").cast, policy.decide("cat").cast) == ("keep", "promote")


def test_gaudis_own_low_list_is_asked_before_a_list_of_fp32(gaudi_list):
    gaudi_list(FP32_LIST, "softmax\nadd\n")
    assert resolve("hpu").decide("softmax.int").cast == "low"
    assert resolve("hpu").decide("add.Tensor").cast == "fp32", "and promote last"


def test_gaudis_lists_reach_what_extends_hpu_alone(gaudi_list, tmp_path):
    own = rules_file(tmp_path, ("gelu", "fp32"))
    own.write_text('extends = "hpu"\n' + own.read_text())
    assert resolve(own).decide("bmm").cast == "low"
    gaudi_list(LOW_LIST, "")
    assert "low" not in resolve("hpu").casts().values()
    assert resolve(own).decide("bmm").cast == "keep"
    assert resolve("tpu") is load("tpu")


def test_a_mistake_in_gaudis_lists_names_file_and_line(gaudi_list, monkeypatch):
    path = gaudi_list(LOW_LIST, "mm\nconv2\n")
    with pytest.raises(PolicyError, match=rf"{path}:2 \({LOW_LIST}\): unknown operation 'conv2'; nearest: conv2d"):
        resolve("hpu")
    monkeypatch.setenv(LOW_LIST, f"{path}.gone")
    with pytest.raises(PolicyError, match=rf"{path}.gone' cannot be read"):
        resolve("hpu")


# Overrides


@pytest.mark.parametrize(
    ("arguments", "keywords", "words"),
    [
        (({"sofmax": "low"},), {}, "policy.override, 'sofmax': unknown operation 'sofmax'; nearest: softmax"),
        (({"softmax": "low"},), {"softmax": "fp32"}, "softmax is given as a mapping and as a keyword"),
        ((), {}, "without rules would change nothing"),
        (("softmax=low",), {}, "map names to casts"),
        (({1: "low"},), {}, r"rules map names to casts.*got 1: 'low'"),
        (({"softmax": ["low"]},), {}, r"rules map names to casts.*got 'softmax': \['low'\]"),
        (({"exp": "low", "exp*": "fp32"},), {}, "operation 'exp' is reached by rules of one layer that disagree"),
    ],
)
def test_mistakes_in_an_override(arguments, keywords, words):
    with pytest.raises(PolicyError, match=words):
        override(*arguments, **keywords)


# Unused rules


def test_unused_rules(monkeypatch, tmp_path):
    monkeypatch.setenv(config.POLICY_FILE, str(rules_file(tmp_path, ("softmax", "low"), ("gelu", "fp32"))))
    monkeypatch.setenv(config.RULES, "softmax=promote;lstm*=low")
    policy = resolve("tpu")
    assert len(unused_rules("tpu")) == 4
    policy.operations()
    policy.decide("softmax.int")
    assert len(unused_rules("tpu")) == 4, "to ask about an operation is no use of a rule"
    effects.asked(policy, "softmax.int", None)
    effects.asked(policy, "mm", None)
    assert [rule.operations for rule in unused_rules("tpu")] == [("gelu",), ("lstm*",)], "outranked counts as used"
    effects.asked(policy, "lstm.input", None)
    assert [rule.operations for rule in unused_rules(policy)] == [("gelu",)]
    assert unused_rules("cuda") != ()
