"""What the AMP documentation of PyTorch, Intel Gaudi and torch_xla says, and the test of each statement."""

from __future__ import annotations

import ast

import pytest
from source_tree import ROOT

ARGUMENTS, REGIONS, RULES, LISTS = (
    f"tests/pytorch/autocast/test_{name}.py"
    for name in ("autocast_arguments", "autocast_regions", "rules_in_regions", "torch_lists")
)
FUNCTIONS, SCALER, TABLES = (
    "tests/pytorch/autocast/test_custom_function.py",
    "tests/pytorch/optim/test_grad_scaler.py",
    "tests/policy/test_tables.py",
)

STATEMENTS = {
    "torch.amp": {
        "CUDA's and the CPU's lists of operations, by cast": f"{LISTS}::test_torchs_lists",
        "operations that are not listed run in the dtypes of their operands": f"{RULES}::test_dtype_of_a_result",
        "float64 and integers are not eligible": f"{RULES}::test_dtype_of_a_result",
        "in-place variants and out= are not eligible": f"{RULES}::test_dtype_of_a_result",
        "an explicit dtype= is respected": f"{RULES}::test_dtype_of_a_result",
        "cat, stack, index_copy: the widest dtype of the operands": f"{RULES}::test_dtype_of_a_result",
        "binary_cross_entropy is an error under CUDA's rules": f"{LISTS}::test_torchs_banned_operations",
        "functions, methods and operators go through autocast": "tests/pytorch/autocast/test_table_rows.py::test_row",
        "a context manager and a decorator": f"{REGIONS}::test_function",
        "enabled=False inside, and a region inside that": f"{REGIONS}::test_sequences",
        "the state belongs to a thread": f"{REGIONS}::test_threads_start_outside_and_share_an_object",
        "cache_enabled": f"{REGIONS}::test_the_cache_flag",
        "another dtype disables, with a warning": f"{ARGUMENTS}::test_float32_disables_with_a_warning_as_in_torch",
        "is_autocast_available": f"{FUNCTIONS}::test_is_autocast_available",
        "custom_fwd, custom_bwd and cast_inputs": f"{FUNCTIONS}::test_cast_inputs_reaches_every_container",
        "a backward pass runs in the dtypes of its forward pass": f"{FUNCTIONS}::test_backward_runs_as_forward_did",
        "gradients have the dtype of their parameter": f"{RULES}::test_gradients_have_the_dtype_of_their_parameter",
        "autocast and GradScaler are of use without each other": f"{SCALER}::test_disabled",
        "scale, unscale, skip, update, several losses and optimizers": (
            "tests/pytorch/optim/test_torch_scaling.py::test_loops"
        ),
        "the scale grows, shrinks, may be below 1": (
            "tests/test_loss_scaling.py::test_random_schedules_equal_torch_bit_for_bit"
        ),
    },
    "Intel Gaudi": {
        "the three lists of operations": f"{TABLES}::test_every_documented_operation_has_a_row",
        "files with lists of one's own replace them": f"{RULES}::test_gaudis_example_with_lists_of_its_own",
        "a wrong name in a file": "tests/policy/test_resolve.py::test_a_mistake_in_gaudis_lists_names_file_and_line",
        "float16 is not supported": f"{ARGUMENTS}::test_what_is_refused",
        "a custom operation has no rule, until the user writes one": f"{RULES}::test_a_custom_operator",
    },
    "torch_xla": {
        "the TPU's lists of operations": f"{TABLES}::test_every_documented_operation_has_a_row",
        "GPUs have CUDA's rules": f"{TABLES}::test_gpu_is_cuda_and_more",
        "autocast(xla_device()), and torch.autocast('xla')": f"{ARGUMENTS}::test_devices",
        "XLA_USE_BF16 has no place beside it: it is warned about": (
            "tests/pytorch/distributed/test_torch_xla_names.py::test_importing_the_device_registers_its_name"
        ),
        "bfloat16 needs no scaler; float16 trains with one": (
            "tests/examples/test_mnist.py::test_one_executable_and_no_host_sync_per_step"
        ),
        "syncfree optimizers read nothing": f"{SCALER}::test_nothing_waits_for_the_device",
        "syncfree optimizers do what torch's do": "tests/pytorch/optim/test_optimizer_options.py::test_options",
        "xm.optimizer_step, _fetch_gradients and all_reduce with a scale": (
            "tests/pytorch/distributed/test_torch_xla_names.py::test_optimizer_step"
        ),
        "the MNIST and ImageNet scripts": "tests/examples/test_imagenet.py::test_fake_data_measures_speed",
    },
}


@pytest.mark.parametrize("page", STATEMENTS)
def test_each_statement_has_a_test(page: str):
    for statement, where in STATEMENTS[page].items():
        file, _, name = where.partition("::")
        body = ast.parse((ROOT / file).read_text()).body
        assert name in {node.name for node in body if isinstance(node, ast.FunctionDef)}, statement
