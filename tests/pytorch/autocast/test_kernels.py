"""Rules on PyTorch's own devices: what changes, for whom, and that nothing is left behind."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import pytest
import samples
import torch
import torch.nn.functional as F
from harness import is_here

import xla_amp
from xla_amp import autocast, policy
from xla_amp.policy import Policy, load
from xla_amp.pytorch.autocast import kernels, operation_recorder
from xla_amp.tools.explain.on_pytorch import ExplainReport

LOW, FULL, HALF = torch.bfloat16, torch.float32, torch.float16
CPU = load("cpu")
KEYS = tuple(kernels.OF_TORCH.values())
TABLE = sorted(filter(is_here, CPU.operations()))


def registrations() -> dict[str, list[str]]:
    return {key: sorted(torch._C._dispatch_get_registrations_for_dispatch_key(key)) for key in KEYS}


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = registrations()
    yield
    assert registrations() == before
    assert not torch.is_autocast_enabled("cpu")


@pytest.fixture
def full() -> torch.Tensor:
    return torch.rand(4, 4)


def conversions(operation: str, *dtypes: torch.dtype) -> set[tuple[torch.dtype, torch.dtype]]:
    """What autocast converts the operands to, which have `dtypes` in turn."""
    given = samples.arguments(operation, samples.Maker("cpu", dtypes))
    watch = samples.Watch()
    try:
        with watch:
            samples.call(operation, given)
    except (RuntimeError, NotImplementedError):
        pass  # on what the operation says about its operands' dtypes: that comes after the cast
    return set(watch.found)


def observed(operation: str) -> str:
    """The cast that is in force for an operation, as seen from what happens to its operands."""
    if conversions(operation, FULL) == {(FULL, LOW)}:
        return "low"
    if conversions(operation, LOW) == {(LOW, FULL)}:
        return "fp32"
    return "promote" if conversions(operation, LOW, FULL) == {(LOW, FULL)} else "keep"


def all_observed(operations=TABLE) -> dict[str, str]:
    return {operation: observed(operation) for operation in operations}


pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # deprecated operations are in the table too


# ---- what torch does, with and without us ----------------------------------------------------------------------------


def test_only_the_overridden_operation_changes_and_afterwards_nothing_has():
    table = {name: CPU.decide(name).cast for name in TABLE}
    dumps = {name: torch._C._dispatch_dump(f"aten::{name}") for name in (*TABLE, "softmax.int", "exp")}
    with torch.autocast("cpu", cache_enabled=False):
        assert all_observed() == table
    with autocast("cpu", cache_enabled=False), policy.override({"mm": "fp32", "mse_loss": "low", "exp": "low"}):
        changed = all_observed((*TABLE, "exp", "softmax.int"))
    assert changed == {**table, "mm": "fp32", "mse_loss": "low", "exp": "low", "softmax.int": "keep"}
    with torch.autocast("cpu", cache_enabled=False):
        assert all_observed((*TABLE, "exp")) == {**table, "exp": "keep"}
    assert {name: torch._C._dispatch_dump(f"aten::{name}") for name in dumps} == dumps


def step(weight: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
    """A forward and backward pass in which a weight is used twice, so that torch's cache of casts counts."""
    weight = weight.clone().requires_grad_()
    with torch.autocast("cpu"):
        hidden = torch.relu(x @ weight)
        loss = F.mse_loss(F.linear(hidden, weight).softmax(-1), x)
    loss.backward()
    return [loss.detach(), weight.grad]


def test_torchs_own_results_stay_bit_for_bit(full):
    torch.manual_seed(0)
    weight, x = torch.randn(4, 4), torch.randn(4, 4)
    expected = step(weight, x)
    with policy.override(exp="low", softmax="keep"):
        held = step(weight, x)  # kernels stand on the key, but the rules say what torch does
    elsewhere: list[torch.Tensor] = []
    with policy.override(matmul="fp32", linear="fp32", mse_loss="low"), autocast("cpu", policy="cuda"):
        thread = threading.Thread(target=lambda: elsewhere.extend(step(weight, x)))
        thread.start()
        thread.join()
    for results in (held, elsewhere, step(weight, x)):
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    with policy.override(matmul="fp32"):
        assert not torch.equal(step(weight, x)[1], expected[1])


# ---- another policy on a native device -------------------------------------------------------------------------------


def cast_under(rules: Policy, operation: str) -> str:
    """As `observed`, for policies that also set dtypes of results."""
    cast = rules.decide(operation).cast
    if cast not in ("fp32_out", "fp32_append"):
        return observed(operation)
    result = samples.call(operation, samples.arguments(operation, samples.Maker("cpu", [LOW])))
    return cast if result.dtype is FULL else "keep"


OTHER_DEVICES = ("cudnn", "_cudnn", "_thnn", "_mps", "_scaled_dot_product_flash_attention", "mkldnn")


@pytest.mark.parametrize("name", ["cuda", "hpu"])
def test_a_region_under_another_devices_policy(name):
    rules = load(name)
    operations = [n for n in rules.ruled() | CPU.ruled() if is_here(n) and not n.startswith(OTHER_DEVICES)]
    expected = {n: rules.decide(n).cast for n in operations if rules.decide(n).cast != "ban"}
    # One tensor operand has nothing to be promoted to; batch and instance norm cast the first operand only.
    single = [n for n, cast in expected.items() if cast == "promote" and n.endswith("Scalar")]
    with autocast("cpu", dtype=LOW, policy=name, cache_enabled=False):
        found = {n: cast_under(rules, n) for n in expected}
    wrong = {n: (found[n], expected[n]) for n in expected if found[n] != expected[n] and n not in single}
    assert wrong == {}


@pytest.mark.parametrize("region", [autocast, torch.autocast], ids=["ours", "torchs"])
def test_a_step_inside_a_region_is_seen_by_the_next_forward_pass(region):
    """torch's own region goes on with the casts of the weights from before the step."""
    weight = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with region("cpu"):
        before = (torch.ones(2, 2) @ weight).sum()
        before.backward()
        optimizer.step()
        after = (torch.ones(2, 2) @ weight).sum()
    assert before.item() == 8
    assert after.item() == (-8 if region is autocast else 8)


# ---- what `explain` reports of torch's kernels -----------------------------------------------------------------------


def done_and_told(report: ExplainReport, operation: str, dtypes: list[torch.dtype]) -> tuple[list[str], list[str]]:
    """Conversions that the dispatcher made before the operation, and those that the report lists for it."""
    given = samples.arguments(operation, samples.Maker("cpu", dtypes))
    report.records.clear()
    with torch.autocast("cpu", cache_enabled=False), samples.Watch() as watch:
        samples.call(operation, given)
    done = [f"{a}->{b}".replace("torch.", "") for a, b in watch.found]
    (told,) = [row for row in report.rows() if row["operation"] == operation]
    return done, told["casts"].split(", ") if told["casts"] else []


def given_to(operation: str) -> list[list[torch.dtype]]:
    """dtypes of operands with which the operation can run on the CPU after its cast."""
    cast = policy.resolve("cpu").decide(operation).cast
    return {"fp32": [[LOW], [FULL], [LOW, FULL]], "low": [[FULL], [LOW], [FULL, LOW]]}.get(cast, [[FULL], [LOW, FULL]])


def test_reports_equal_what_the_dispatcher_does_for_every_registered_operation():
    by_torch = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU")
    unnamed = {name.removeprefix("aten::") for name in by_torch if "dimname" not in name.lower()}
    assert unnamed == set(TABLE)
    wrong = {}
    with xla_amp.explain() as report:
        for operation in TABLE:
            for dtypes in given_to(operation):
                done, told = done_and_told(report, operation, dtypes)
                if done != told:
                    wrong[operation, str(dtypes)] = done, told
    assert wrong == {}


@pytest.mark.parametrize("device_type", ["cpu", "xla"])
def test_a_kernel_that_is_held_again_is_the_one_that_torch_has(device_type):
    """The dispatcher keeps a released kernel for as long as another operation of the same hold is held."""
    device = torch.device("cpu") if device_type == "cpu" else xla_amp.xla_device()
    present = set(kernels._installed)
    names = [name for name in operation_recorder._operations(kernels.KEYS[device.type]) if name != "neg"]
    releases = []
    for name in itertools.islice((each for each in names if (device.type, each) not in present), 500):
        release = kernels.hold(device.type, ("neg", name))
        releases.append(kernels.hold(device.type, (name,)))
        release()  # kernels that call each other would be too deep in the end
    releases.append(kernels.hold(device.type, ("neg",)))
    with torch.autocast(device.type, dtype=torch.bfloat16):
        found = torch.neg(torch.ones(2, device=device))
    for release in releases:
        release()
    assert found.tolist() == [-1, -1]
    assert set(kernels._installed) == present
