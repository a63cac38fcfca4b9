"""Reading policies: what is accepted, and that each mistake gives one error with file, row and fix.

Mistakes in names and casts are in test_malformed_and_ineffective.py.
"""

from __future__ import annotations

import copy
import doctest
import os
import pickle
import re
import sys
from pathlib import Path

import pytest

from xla_amp.common.types import CASTS
from xla_amp.errors import PolicyError, XlaAmpError
from xla_amp.policy import BUILTIN, load, override, resolve
from xla_amp.policy.load import default_name

ROW = '[[rule]]\noperations = ["gelu"]\ncast = "fp32"\n'


def write(folder, text, name="mine.toml"):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", BUILTIN)
def test_builtin_names_load_once_and_are_named_so(name):
    policy = load(name)
    assert policy.name == name
    assert load(name) is policy
    assert load(policy) is policy
    assert policy.low in policy.dtypes
    assert policy.summary
    assert policy.source


def test_default_policy_of_a_platform(request):
    assert [default_name(each) for each in ("tpu", "gpu", "CUDA", "rocm")] == ["tpu", "gpu", "gpu", "gpu"]
    assert default_name("cpu") == (request.config.getoption("--platform-policy") or "tpu")


def test_low_dtypes_of_the_fronts_differ_for_a_gpu_only(tmp_path):
    assert {name: load(name).jax_low for name in BUILTIN if load(name).jax_low != load(name).low} == {"gpu": "bfloat16"}
    gpu = load("gpu")
    assert (gpu.low, gpu.named_low) == ("float16", "float16 (JAX, StableHLO: bfloat16)")
    assert (resolve("gpu", {"exp": "low"}).jax_low, load("tpu").named_low) == ("bfloat16", "bfloat16")
    assert pickle.loads(pickle.dumps(gpu)) == gpu
    files = {
        'extends = "gpu"\n': ("float16", "bfloat16"),
        'extends = "gpu"\nlow = "float16"\n': ("float16", "float16"),
        'low = "float16"\n': ("float16", "float16"),
        'low = "bfloat16"\njax_low = "float16"\ndtypes = ["bfloat16", "float16"]\n': ("bfloat16", "float16"),
    }
    for number, (text, low) in enumerate(files.items()):
        policy = load(write(tmp_path, text + ROW, f"{number}.toml"))
        assert (policy.low, policy.jax_low) == low, text
    with pytest.raises(PolicyError, match=r"jax_low = 'bfloat16' is not in dtypes = \['float16'\]; add it there"):
        load(write(tmp_path, 'low = "float16"\njax_low = "bfloat16"\n' + ROW))


@pytest.mark.parametrize(
    ("function", "name", "message"),
    [
        (load, "cudda", "unknown policy 'cudda'; nearest: cuda"),
        (load, 7, r"expects the name of a policy.*got 7 \(int\)"),
        (default_name, "neuron", "no default policy for XLA platform 'neuron'"),
    ],
)
def test_what_is_no_policy_or_no_platform(function, name, message):
    with pytest.raises(PolicyError, match=message) as caught:
        function(name)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, XlaAmpError)


def test_a_file_of_its_own(tmp_path):
    policy = load(write(tmp_path, 'low = "float16"\n' + ROW))
    assert (policy.name, policy.low, policy.dtypes) == ("mine", "float16", ("float16",))
    both = write(tmp_path, 'low = "float16"\ndtypes = ["bfloat16", "float16"]\n' + ROW, "both.toml")
    assert load(both).dtypes == ("bfloat16", "float16")
    assert policy.decide("gelu").cast == "fp32"
    assert policy.decide("gelu").layer == "file"
    assert policy.decide("mm").cast == "keep"


def test_a_file_that_extends(tmp_path):
    path = write(tmp_path, 'extends = "tpu"\nname = "mine-too"\n\n' + ROW + 'why = "overflowed in run 12"\n')
    policy = load(str(path))
    assert policy.name == "mine-too"
    assert policy.low == load("tpu").low
    assert policy.decide("mm") == load("tpu").decide("mm")
    assert policy.decide("gelu").why == "overflowed in run 12"
    assert policy.decide("gelu").origin == f"{path}:4 (rule 1)"
    assert policy.decide("sigmoid").why.startswith("no rule")
    assert policy.decide("sigmoid").origin == ""


def test_a_bare_name_reaches_every_overload_and_a_glob_every_match(tmp_path):
    text = 'extends = "tpu"\n[[rule]]\noperations = ["pow", "aten::linalg_*", "sum.dim_IntList"]\ncast = "low"\n'
    policy = load(write(tmp_path, text))
    for operation in ("pow.Scalar", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "linalg_norm", "linalg_norm.ord_str"):
        assert policy.decide(operation).cast == "low"
        assert operation in policy.operations()
    assert policy.decide("sum.dim_IntList").cast == "low"
    assert policy.decide("sum").cast == "fp32_out", "an exact name reaches that overload only"


def test_a_name_without_its_overload_is_decided_where_all_agree():
    policy = load("tpu")
    assert policy.decide("softmax").rule is policy.decide("softmax.int").rule is not None
    assert policy.decide("pow").cast == policy.decide("pow.Tensor_Scalar").cast == "fp32"
    assert policy.decide("view").rule is policy.decide("mylib::attention").rule is None
    with override({"pow.Scalar": "low"}), pytest.raises(PolicyError, match=r"name one of them: pow\.Scalar = low"):
        resolve("tpu").decide("pow")
    with pytest.raises(PolicyError, match="unknown operation 'softmx'; nearest: softmax"):
        policy.decide("softmx")
    with (
        pytest.raises(PolicyError, match=r"a module of that name is '\*/model/head'"),
        override({"model.head": "fp32"}),
    ):
        pass


def test_an_unchanged_file_is_read_once_and_a_changed_one_again(tmp_path):
    path = write(tmp_path, 'extends = "tpu"\n' + ROW)
    first = load(path)
    assert load(path) is first
    write(tmp_path, 'extends = "tpu"\n' + ROW.replace("fp32", "low"))
    os.utime(path, ns=(1, 1))
    assert load(path).decide("gelu").cast == "low"


def test_policies_are_values(tmp_path):
    policy = load(write(tmp_path, 'extends = "tpu"\n' + ROW))
    twin = pickle.loads(pickle.dumps(policy))
    assert twin == policy == copy.deepcopy(policy)
    assert hash(twin) == hash(policy)
    assert twin is not policy
    assert twin != load("tpu")
    assert {policy: 1}[twin] == 1
    assert twin.decide("gelu").cast == "fp32"
    assert "mine.toml" in repr(twin)


MISTAKES = {
    "not TOML": ("[[rule]\n", ["not TOML", "line 1"]),
    "single brackets": ('low = "float16"\n[rule]\noperations = ["mm"]\ncast = "low"\n', ["[[rule]]", "two brackets"]),
    "an s too many": ('extends = "tpu"\n[[rules]]\noperations = ["mm"]\ncast = "low"\n', ["'rules'", "[[rule]]"]),
    "header key": ('lo = "float16"\n' + ROW, ["unknown header key 'lo'", "did you mean 'low'?"]),
    "row key": ('extends = "tpu"\n' + ROW + 'wy = "x"\n', [":2 (rule 1)", "unknown key 'wy'", "'why'"]),
    "no low": (ROW, ["low is missing", 'extends = "tpu"']),
    "low dtype": ('low = "float8"\n' + ROW, ["low names 'float8'", "bfloat16, float16"]),
    "low not legal": ('low = "float16"\ndtypes = ["bfloat16"]\n' + ROW, ["low = 'float16' is not in dtypes"]),
    "dtypes": ('low = "float16"\ndtypes = "float16"\n' + ROW, ["dtypes must be a list"]),
    "name": ("name = 3\n" + ROW, ["name must be a string, got 3"]),
    "extends": ('extends = "tpuu"\n' + ROW, ["extends = 'tpuu' is no built-in policy", "tpu"]),
    "no operations": ('extends = "tpu"\n[[rule]]\ncast = "low"\n', [":2 (rule 1)", "operations missing"]),
    "empty operations": ('extends = "tpu"\n[[rule]]\noperations = []\ncast = "low"\n', [":2 (rule 1)", "non-empty"]),
    "operations is a string": ('extends = "tpu"\n[[rule]]\noperations = "mm"\ncast = "low"\n', ["got 'mm'"]),
    "why": ('extends = "tpu"\n' + ROW + "why = 1\n", [":2 (rule 1)", "why must be a string, got 1"]),
    "twice": (
        'extends = "tpu"\n' + ROW + ROW.replace("fp32", "low"),
        [":5 (rule 2)", "'gelu' is written twice", ":2 (rule 1)"],
    ),
    "disagreement": (
        'extends = "tpu"\n' + ROW + '[[rule]]\noperations = ["gel*"]\ncast = "low"\n',
        ["'gelu' is reached by rules", "gelu = fp32", ":2 (rule 1)", "gel* = low", ":5 (rule 2)"],
    ),
}


@pytest.mark.parametrize(("text", "words"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_names_file_row_and_fix(tmp_path, text, words):
    path = write(tmp_path, text)
    with pytest.raises(PolicyError) as caught:
        load(path)
    message = str(caught.value)
    assert "mine.toml" in message
    assert "\n" not in message
    for word in words:
        assert word in message


def test_missing_and_unreadable_files(tmp_path):
    with pytest.raises(PolicyError, match=r"nowhere.toml.*cannot be read"):
        load(tmp_path / "nowhere.toml")
    (tmp_path / "latin.toml").write_bytes(b'low = "\xff"')
    with pytest.raises(PolicyError, match=r"latin.toml.*cannot be read"):
        load(tmp_path / "latin.toml")


@pytest.mark.parametrize("name", ["load", "op_catalog", "policy", "resolve"])
def test_examples_in_the_docstrings(name):
    result = doctest.testmod(sys.modules[f"xla_amp.policy.{name}"])  # the package's attribute may be the function
    assert result.failed == 0
    assert result.attempted > 0


PAGE = (Path(__file__).parents[2] / "docs" / "policy.md").read_text(encoding="utf-8")
(EXAMPLE,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)

CHANGES = [('"softmax"', '"sofmax"'), ('cast = "fp32"', 'cast = "float32"'), ("mylib::attention", "softmax")]


def test_the_example_of_the_page_loads(tmp_path):
    policy = load(write(tmp_path, EXAMPLE))
    assert policy.name == "mine"
    assert policy.decide("linalg_norm").cast == "fp32"
    assert policy.decide("mylib::attention").cast == "low"


@pytest.mark.parametrize("number", range(3))
def test_error_messages_are_those_of_the_page(tmp_path, monkeypatch, number):
    monkeypatch.chdir(tmp_path)
    shown = [line for line in PAGE.splitlines() if line.startswith("mine.toml:")][number]
    write(tmp_path, EXAMPLE.replace(*CHANGES[number]))
    with pytest.raises(PolicyError) as caught:
        load("mine.toml")
    assert str(caught.value).startswith(shown.partition("...")[0])


def test_the_tables_of_the_page_are_complete():
    first_columns = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    policies = "tpu gpu cuda xpu mps cpu hpu cautious lean"
    assert first_columns == [*CASTS, *policies.split()]
    assert set(first_columns[len(CASTS) :]) == set(BUILTIN)
