"""The built-in tables: well formed, consistent, complete against the documents they cite and the installed torch."""

from __future__ import annotations

import importlib.resources
import re
import textwrap
import tomllib
from pathlib import Path

import pytest
import torch
from harness import is_here
from packaging.specifiers import SpecifierSet

from xla_amp.policy import BUILTIN, load
from xla_amp.policy.load import from_text
from xla_amp.policy.op_catalog import (
    catalogue,
    equivalent,
    known_operations,
    matching,
    operation_class,
    packet,
    read_table,
    unfit,
)

PARENTS = {"cautious": ("tpu",), "lean": ("tpu",)}


@pytest.mark.parametrize("name", BUILTIN)
def test_every_row_is_complete_sorted_and_reachable(name):
    policy = load(name)
    used = {policy.decide(operation).rule for operation in policy.operations()}
    used |= {policy.decide(operation).rule for rule in policy.rules for operation in rule.operations}
    in_modules = (name.split(".") for rule in policy.rules for name in rule.operations if name.startswith("module:*."))
    used |= {policy.decide(operation, f"model.{module}").rule for _, module, operation in in_modules}
    for rule in policy.rules:
        exact = [name for name in rule.operations if not name.startswith("module:")]
        assert catalogue().classes.keys() >= set(exact)
        assert not unfit(exact, rule.cast)
        assert not rule.why.startswith("asked for in")
        assert not rule.source.startswith("tables/")
        assert list(rule.operations) == sorted(set(rule.operations))
        parents = PARENTS.get(name, ("cuda",))
        assert any(f"tables/{each}.toml:" in rule.origin for each in (name, *parents))
        own = f"tables/{name}.toml:" in rule.origin
        assert not own or rule in used, "a row that never decides anything"


def test_every_table_file_is_a_policy_or_the_catalogue():
    tables = importlib.resources.files("xla_amp.policy") / "tables"
    assert sorted(f.name for f in tables.iterdir()) == sorted(f"{name}.toml" for name in (*BUILTIN, "classes"))


# What the documents list, by their own names; torch itself says it of the others (below).

XLA_LOW = (
    "__matmul__ addbmm addmm addmv addr baddbmm bmm conv1d conv2d conv3d conv_transpose1d conv_transpose2d "
    "conv_transpose3d linear matmul mm relu prelu max_pool2d"
)
XLA_FP32 = (
    "batch_norm log_softmax binary_cross_entropy binary_cross_entropy_with_logits prod cdist trace chloesky inverse "
    "reflection_pad replication_pad mse_loss cosine_embbeding_loss nll_loss multilabel_margin_loss qr svd "
    "triangular_solve linalg_svd linalg_inv_ex"
)
XLA_PROMOTE = "stack cat index_copy"
HPU_LOW = (
    "addmm addbmm batch_norm baddbmm bmm conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d dot "
    "dropout feature_dropout group_norm instance_norm layer_norm leaky_relu linear matmul mean mm mul mv softmax "
    "log_softmax scaled_dot_product_attention"
)
HPU_FP32 = (
    "acos addcdiv asin atan2 bilinear binary_cross_entropy binary_cross_entropy_with_logits cdist cosh "
    "cosine_embedding_loss cosine_similarity cross_entropy_loss dist div divide embedding embedding_bag erfinv exp "
    "expm1 hinge_embedding_loss huber_loss kl_div l1_loss log log10 log1p log2 logsumexp margin_ranking_loss mse_loss "
    "multi_margin_loss multilabel_margin_loss nll_loss pdist poisson_nll_loss pow reciprocal renorm rsqrt sinh "
    "smooth_l1_loss soft_margin_loss softplus tan topk triplet_margin_loss truediv true_divide"
)
HPU_PROMOTE = "add addcmul addcdiv cat div exp mul pow sub iadd truediv stack"
HPU_TWICE = {"mul": "low", "addcdiv": "fp32", "div": "fp32", "exp": "fp32", "pow": "fp32", "truediv": "fp32"}

DOCUMENTED = [
    ("tpu", XLA_LOW, {"low"}),
    ("tpu", XLA_FP32, {"fp32"}),
    ("tpu", XLA_PROMOTE, {"promote"}),
    ("cuda", "binary_cross_entropy", {"ban"}),
    ("hpu", HPU_LOW, {"low"}),
    ("hpu", HPU_FP32, {"fp32"}),
    ("hpu", HPU_PROMOTE, {"promote"}),
]


def casts_of(policy, documented):
    """Casts that the table gives to what a document calls `documented`."""
    spelled = catalogue().spellings.get(documented) or (documented,)
    casts = load(policy).casts()
    return [{cast for name, cast in casts.items() if name == part or packet(name) == part} for part in spelled]


@pytest.mark.parametrize(("policy", "listed", "allowed"), DOCUMENTED, ids=[f"{p}-{min(a)}" for p, _, a in DOCUMENTED])
def test_every_documented_operation_has_a_row(policy, listed, allowed):
    for name in listed.split():
        expected = {HPU_TWICE[name]} if policy == "hpu" and name in HPU_TWICE else allowed
        for casts in casts_of(policy, name):
            assert casts, f"{policy} has no row for the documented {name}"
            assert casts <= expected, f"{policy}: {name} is documented in {sorted(expected)}, the table has {casts}"


def test_tpu_covers_cuda_and_every_row_says_where_from():
    tpu, cuda = load("tpu"), load("cuda")
    vendor = {"_cudnn_rnn", "cudnn_convolution", "cudnn_convolution_transpose"}
    assert cuda.operations() - tpu.operations() == vendor
    page = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    shown = textwrap.dedent(re.search(r"^ +```toml\n(.*?)^ +```", page, re.DOTALL | re.MULTILINE).group(1))
    for rule in (*tpu.rules, *from_text("tables/cpu.toml", f'low = "bfloat16"\n{shown}', "builtin").rules):
        documented = "PyTorch/XLA documentation" in rule.source
        registered = "torch_xla 2.9" in rule.source
        if not documented and not registered:
            assert "added to match" in rule.note, rule.origin
        if registered and not documented:
            assert rule.note.startswith("Registered, but not in the documentation"), rule.origin


def test_tpu_differs_from_cuda_only_where_xla_says_so():
    """torch_xla casts the operands of softmax and prod, where CUDA asks for a float32 result, and casts BCE."""
    tpu, cuda = load("tpu").casts(), load("cuda").casts()
    different = {name: (cuda[name], tpu[name]) for name in cuda.keys() & tpu.keys() if cuda[name] != tpu[name]}
    assert different == {
        "binary_cross_entropy": ("ban", "fp32"),
        "log_softmax.int": ("fp32_out", "fp32"),
        "prod": ("fp32_out", "fp32"),
        "prod.dim_int": ("fp32_out", "fp32"),
        "softmax.int": ("fp32_out", "fp32"),
    }


def test_gpu_is_cuda_and_more():
    gpu, cuda = load("gpu").casts(), load("cuda").casts()
    assert cuda.items() <= gpu.items()
    assert {gpu[name] for name in gpu.keys() - cuda.keys()} == {"low", "fp32"}


def test_a_banned_operation_says_what_to_use():
    for name in ("cuda", "gpu", "xpu"):
        assert "binary_cross_entropy_with_logits" in load(name).decide("binary_cross_entropy").why
    assert load("mps").decide("binary_cross_entropy").cast == "keep"


# The catalogue


def test_operation_class():
    expected = {
        "mm": "contraction",
        "conv2d.padding": "convolution",
        "softmax.int": "normalization",
        "sum.dim_IntList": "reduction",
        "exp": "transcendental",
        "cat": "data_movement",
        "add.Tensor": "elementwise",
        "cross_entropy_loss": "loss",
        "add.not_yet_known": "elementwise",
        "mylib::attention": None,
    }
    assert {operation: operation_class(operation) for operation in expected} == expected


def test_other_vocabularies_point_to_operations_of_the_same_class():
    for table in catalogue().names.values():
        for name, operation in table.items():
            assert operation in catalogue().classes, name
    tpu = load("tpu")
    for name, cast in (("dot_general", "low"), ("exp", "fp32"), ("reduce_sum", "fp32_out"), ("add", "keep")):
        assert tpu.decide(equivalent("jaxpr", name) or "").cast == cast
    for name, cast in (("dot_general", "low"), ("exponential", "fp32"), ("reduce.add", "fp32_out")):
        assert tpu.decide(equivalent("stablehlo", name) or "").cast == cast
    assert equivalent("stablehlo", "custom_call") is None


def test_operations_that_other_vocabularies_write_alike():
    composites = (operation for operation, _ in catalogue().composites.values())
    written = {*catalogue().names["jaxpr"].values(), *catalogue().names["stablehlo"].values(), *composites}
    assert list(catalogue().same) == sorted(catalogue().same)
    for operation, others in catalogue().same.items():
        assert operation in written, "no operation of jaxpr or StableHLO has this name"
        assert list(others) == sorted(set(others) - {operation})
        assert set(others) <= catalogue().classes.keys()


def test_names_of_primitives_are_jax_names():
    primitives = pytest.importorskip("jax.extend.core.primitives")
    known = {getattr(primitives, name).name for name in dir(primitives) if name.endswith("_p")}
    unpublished = {"ragged_dot_general", "scaled_dot", "split"}  # primitives that jax.extend does not list
    assert set(catalogue().names["jaxpr"]) - known <= unpublished


def test_names_of_stablehlo_operations_exist():
    known = set()
    for dialect in ("chlo", "stablehlo"):
        operations = pytest.importorskip(f"jaxlib.mlir.dialects._{dialect}_ops_gen")
        known |= {value.OPERATION_NAME for value in vars(operations).values() if hasattr(value, "OPERATION_NAME")}
    for name in catalogue().names["stablehlo"]:
        assert (name if name.startswith("chlo.") else f"stablehlo.{name.partition('.')[0]}") in known


# The installed torch: names that it registers, and casts of its header.  What the CPU's kernels do is in
# tests/pytorch/autocast/test_kernels.py.

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"


def changed(name):
    """Whether the installed torch is known to register `name` differently than the tables, which are of torch 2.13."""
    named = re.search(r"[dD]imname|\.names_", name)  # gone from 2.12 on
    return not is_here(name) or (TORCH != (2, 13) and (name == "rms_norm" or named))


def registered(key):
    listed = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in listed if name.startswith("aten::")}


def differences(table, torch_says):
    """Readable lines, one per operation that the two do not agree on."""
    missing, extra = sorted(torch_says - table), sorted(table - torch_says)
    return [f"torch registers {name}, the table has no row" for name in missing if not changed(name)] + [
        f"the table has {name}, torch does not register it" for name in extra if not changed(name)
    ]


@pytest.mark.parametrize(
    ("policy", "key", "not_in_this_build"),
    [
        ("cpu", "AutocastCPU", set()),
        ("cuda", "AutocastCUDA", set() if torch.version.cuda else {"_cudnn_rnn"}),
        ("xpu", "AutocastXPU", set()),
        ("xpu", "AutocastMTIA", set()),
        ("mps", "AutocastMPS", set()),
    ],
)
def test_tables_name_what_torch_registers(policy, key, not_in_this_build):
    assert differences(set(load(policy).operations()) - not_in_this_build, registered(key)) == []


MACROS = {
    "AT_FORALL_LOWER_PRECISION_FP": "low",
    "AT_FORALL_FP32": "fp32",
    "AT_FORALL_FP32_SET_OPT_DTYPE": "fp32_out",
    "AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE": "fp32_append",
    "AT_FORALL_PROMOTE": "promote",
}


def header_casts():
    """Operation -> cast, from the macros that the C++ registrations for CUDA and XPU are generated from."""
    text = HEADER.read_text().replace("\\\n", " ")
    casts = {}
    for macro, cast in MACROS.items():
        (body,) = re.findall(rf"#define {macro}\(_\)(.*)", text)
        if cast == "fp32_append":
            found = re.findall(r'"([\w.]+)"', body)
        else:
            found = [".".join(filter(None, pair)) for pair in re.findall(r"_\((\w+)(?:,\s*(\w+))?\)", body)]
        casts.update(dict.fromkeys(found, cast))
    return casts


@pytest.mark.parametrize("policy", ["cuda", "xpu"])
def test_casts_are_those_of_the_header(policy):
    if not HEADER.exists():
        pytest.skip("this torch ships no headers")
    expected = header_casts()
    assert len(expected) > 110
    found = dict(load(policy).casts())
    not_in_macros = {"_cudnn_rnn", "cudnn_convolution", "cudnn_convolution_transpose", "binary_cross_entropy"}
    not_in_macros.add("linalg_matrix_sqrth")
    wrong = {
        name: f"torch {expected.get(name)}, table {found.get(name)}"
        for name in (expected.keys() | found.keys()) - not_in_macros
        if expected.get(name) != found.get(name) and not changed(name)
    }
    assert wrong == {}


def test_torch_has_the_names_of_the_catalogue_in_the_versions_that_it_says():
    known = {name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names()}
    expected = set(filter(is_here, catalogue().classes))
    assert expected - known == set()
    assert known & catalogue().classes.keys() - expected == set()
    for versions, names in tomllib.loads(read_table("classes"))["torch"].items():
        assert str(SpecifierSet(versions)) == versions
        assert names == sorted(set(names) & catalogue().classes.keys())


def test_names_that_only_torch_knows():
    """The PyTorch front adds them: such a name takes a rule, its in-place form does not."""
    importlib.import_module("xla_amp.pytorch.autocast.kernels")
    assert matching("special_airy_ai") == ("special_airy_ai",)
    assert matching("add_") == ()
    assert matching("topk") == ("topk",), "topk.values is an out= form"
    assert "special_airy_ai" not in matching("special_*"), "a glob depends on the catalogue alone"
    assert not any(name.endswith(("_", ".out", "_backward")) for name in known_operations())
