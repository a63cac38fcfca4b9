"""Every row of every built-in table on the lazy device: result dtypes, and values against casting by hand.

Each operation of a row is called inside a region under the row's policy, and again outside of it with operands that
the test has cast as the row says.  Both must agree bit for bit: it is the same program.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import samples
import torch
from harness import is_here

import xla_amp
from xla_amp import autocast
from xla_amp.policy import BUILTIN, Policy, Rule, load

NOT_ON_DEVICE: Mapping[str, str] = MappingProxyType(
    {
        "_cudnn_rnn": "cuDNN's kernel, with weights in cuDNN's layout",
        "cudnn_convolution": "cuDNN's kernel; convolution is there",
        "cudnn_convolution_transpose": "cuDNN's kernel; convolution is there",
        "_mps_convolution": "Metal's kernel; convolution is there",
        "mkldnn_rnn_layer": "oneDNN's kernel; lstm is there",
        "_scaled_dot_product_flash_attention": "one backend's kernel; scaled_dot_product_attention is there",
        "fractional_max_pool2d": "no model that we know has it",
        "fractional_max_pool3d": "no model that we know has it",
    }
)
"""Operation -> why the lazy device refuses it.  Such a row is still run: it must be refused, with an error."""

FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
FIRST_OPERAND_ONLY = ("batch_norm", "instance_norm")
"""Their running statistics are written to; see `xla_amp.pytorch.autocast.casting`."""


def given(cast: str, low: torch.dtype) -> list[torch.dtype]:
    """dtypes that operands have in turn, such that the cast changes some of them."""
    if cast == "low":
        return [torch.float32]
    return [low, torch.float32] if cast == "promote" else [low]


def cast_to(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype in FLOATING else value
    if isinstance(value, list):
        return [cast_to(item, dtype) for item in value]
    return value


def by_hand(operation: str, cast: str, low: torch.dtype, sample: samples.Arguments, made: int) -> Any:
    """The operation outside autocast, as the cast says for `made` operands."""
    positional, keywords = sample
    if cast == "fp32_out":
        return samples.call(operation, (positional, {**keywords, "dtype": torch.float32}))
    if cast == "keep":
        return samples.call(operation, sample)
    if cast == "fp32_append":
        positional = (*positional, False) if operation == "norm.ScalarOpt_dim" else positional  # keepdim
        sibling = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}[operation]
        return samples.call(sibling, (positional, {"dtype": torch.float32}))
    if cast == "fp32_inside":
        main, *statistics = tensors(by_hand(operation, "fp32", low, sample, made))
        return [main.to(low), *statistics]
    target = low if cast == "low" or (cast == "promote" and made == 1) else torch.float32
    if operation in FIRST_OPERAND_ONLY:
        return samples.call(operation, ((cast_to(positional[0], target), *positional[1:]), keywords))
    changed = tuple(cast_to(value, target) for value in positional)
    return samples.call(operation, (changed, {name: cast_to(value, target) for name, value in keywords.items()}))


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors(item)]
    return [value] if isinstance(value, torch.Tensor) else []


def difference(results: list[torch.Tensor], expected: list[torch.Tensor], *, values: bool = True) -> str | None:
    for number, (one, other) in enumerate(zip(results, expected, strict=True)):
        if one.dtype is not other.dtype or one.shape != other.shape:
            return f"result {number} is {one.dtype} {tuple(one.shape)}, by hand {other.dtype} {tuple(other.shape)}"
        if values and not torch.equal(torch.nan_to_num(one.cpu(), 123.0), torch.nan_to_num(other.cpu(), 123.0)):
            return f"result {number}: the values are not those of casting by hand"
    return None


class Trial:
    """One operation under one policy, recorded but not run: reading the first value runs what was recorded."""

    def __init__(self, policy: Policy, operation: str, cast: str, device: torch.device) -> None:
        self.operation, self.cast = operation, cast
        self.low = getattr(torch, policy.low)
        self.results: list[torch.Tensor] = []
        self.expected: list[torch.Tensor] = []
        region = autocast(device, policy=policy)
        maker = samples.Maker(device, given(cast, self.low))
        sample = samples.arguments(operation, maker)
        self.made = maker.made
        if cast == "ban":
            with region, pytest.raises(RuntimeError, match="unsafe to autocast"):
                samples.call(operation, sample)
        elif (operation, cast) == ("linalg_matrix_sqrth", "keep"):  # torch has no form of it for a low dtype
            with region, pytest.raises(RuntimeError, match="Low precision dtypes not supported"):
                samples.call(operation, sample)
        elif operation in NOT_ON_DEVICE:
            with region, pytest.raises(RuntimeError, match=r"has no lowering|not implemented|not allocated"):
                samples.call(operation, sample)
        else:
            torch.manual_seed(0)
            with region:
                self.results = tensors(samples.call(operation, sample))
            # The operands are made once more: running statistics have changed.
            sample = samples.arguments(operation, samples.Maker(device, given(cast, self.low)))
            torch.manual_seed(0)
            self.expected = tensors(by_hand(operation, cast, self.low, sample, self.made))

    def problem(self, *, values: bool = True) -> str | None:
        """What the operation does otherwise than its cast says, or None."""
        is_low = self.cast in ("low", "fp32_inside") or (self.cast == "promote" and self.made == 1)
        aim = self.low if is_low else torch.float32
        results = self.results[:1] if self.cast == "fp32_inside" else self.results  # statistics stay float32
        floating = {tensor.dtype for tensor in results if tensor.dtype in FLOATING}
        if floating - {aim} and self.cast != "keep":
            return f"{self.operation}: {floating}, not {aim}"
        found = difference(self.results, self.expected, values=values)
        return found and f"{self.operation}: {found}"


def rows() -> Iterator[Any]:
    """(policy, rule) of each row; one whose operations all have that cast in a table before it is for the full run."""
    seen: set[tuple[str, str]] = set()
    for name in BUILTIN:
        table = load(name)
        for number, rule in enumerate(table.rules, 1):
            found = {(operation, table.decide(operation).cast) for operation in rule.operations}
            marks = pytest.mark.full if found <= seen else ()
            seen |= found
            yield pytest.param(table, rule, id=f"{name}-{number}-{rule.cast}", marks=marks)


@pytest.fixture(scope="module")
def device():
    return xla_amp.xla_device()


SEEN: set[tuple[str, str]] = set()
"""Operation and cast whose values were compared; policies share most rows, and test_torch_lists.py has float16."""


@pytest.mark.filterwarnings("ignore")  # deprecated operations have rows too
@pytest.mark.parametrize(("policy", "rule"), list(rows()))
def test_row(policy: Policy, rule: Rule, device):
    trials, found = [], []
    for operation in filter(is_here, rule.operations):
        cast = policy.decide(operation).cast
        trial = Trial(policy, operation, cast, device)
        if (operation, cast) in SEEN:  # and what it recorded is dropped, not run
            found.append(trial.problem(values=False))
        else:
            trials.append(trial)
            SEEN.add((operation, cast))
    found += [trial.problem() for trial in trials]
    assert [problem for problem in found if problem] == []


def test_samples_are_for_listed_operations_and_for_all_of_them():
    listed = frozenset[str]().union(*(load(name).ruled() for name in BUILTIN))
    assert samples.SAMPLES.keys() == listed
    assert NOT_ON_DEVICE.keys() <= listed


def test_a_value_that_was_rounded_is_noticed(device):
    exact = torch.rand(64, device=device)
    assert difference([exact], [exact.bfloat16().float()]) is not None
    assert difference([exact], [exact.clone()]) is None
