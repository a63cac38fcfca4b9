"""`torch.utils.checkpoint` with `backward()` outside of the region: the second pass follows the rules of the first.

Compared with the same program without checkpointing: dtypes of each pass, and gradients to the bit.
"""

from __future__ import annotations

import contextlib
import threading
import weakref

import pytest
import torch
from torch.utils import checkpoint as torchs
from torch.utils.checkpoint import checkpoint

from xla_amp import autocast, policy
from xla_amp.policy import regions

LOW, FULL = torch.bfloat16, torch.float32
RULES = {"tanh": "low", "linear": "fp32", "softmax.int": "low"}
OTHER = {"tanh": "fp32"}


@pytest.fixture(autouse=True)
def _nothing_stays_in_torch():
    def state():
        registered = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU")
        return torchs._CheckpointFrame.__init__, torchs.CheckpointFunction.__dict__["forward"], sorted(registered)

    before = state()
    yield
    assert state() == before


class Model(torch.nn.Module):
    """Two blocks, run by `call`; the dtypes that each pass of a block saw are appended to `seen`."""

    def __init__(self, call=lambda function, x: function(x), inside=contextlib.nullcontext) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
        self.call, self.inside = call, inside
        self.seen: dict[str, list[tuple[torch.dtype, ...]]] = {"first": [], "second": []}

    def block(self, name: str, x):
        with self.inside():
            y = getattr(self, name)(x)
            z = torch.tanh(y)
            probabilities = torch.softmax(z, -1)
        self.seen[name].append((y.dtype, z.dtype, probabilities.dtype))
        return probabilities + z * x

    def forward(self, x):
        for name in ("first", "second"):
            x = self.call(lambda x, name=name: self.block(name, x), x)
        return x.float().square().sum()


def run(device, around, call=lambda function, x: function(x), inside=contextlib.nullcontext, backward=None):
    model = Model(call, inside).to(device)
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
    with around():
        loss = model(x)
    (backward or torch.Tensor.backward)(loss)
    gradients = [x.grad, *(parameter.grad for parameter in model.parameters())]
    return model.seen, [each.cpu() for each in gradients if each is not None]


def same(device, around, inside=contextlib.nullcontext, backward=None, reentrant=False) -> tuple[torch.dtype, ...]:
    """Compares a checkpointed run with a plain one, and returns the dtypes that a block saw."""
    wanted, exact = run(device, around, inside=inside, backward=backward)
    seen, gradients = run(
        device, around, lambda function, x: checkpoint(function, x, use_reentrant=reentrant), inside, backward
    )
    for name, (once,) in wanted.items():
        assert seen[name] == [once, once], name
    assert len(gradients) == len(exact) == 5
    for gradient, expected in zip(gradients, exact, strict=True):
        assert torch.equal(gradient, expected)
    return wanted["first"][0]


def ruled(device):
    return autocast(device, rules=RULES)


both = pytest.mark.parametrize("reentrant", [False, True])


@contextlib.contextmanager
def nested(*contexts):
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


@pytest.fixture
def early():
    """Without this torch ends the second pass at the last tensor that it needs, before our function notes dtypes."""
    with torchs.set_checkpoint_early_stop(False):
        yield


REGIONS = {
    "rules": (ruled, None, (FULL, LOW, LOW)),
    "others": (lambda device: autocast(device, rules=OTHER), None, (LOW, FULL, FULL)),
    "module": (
        lambda device: autocast(device, rules={"module:first": "fp32", "tanh": "fp32"}), None, (FULL, FULL, FULL)
    ),
    "nested": (lambda device: nested(autocast(device, rules=OTHER), ruled(device)), None, (FULL, LOW, LOW)),
    "off": (lambda device: nested(ruled(device), autocast(device, enabled=False)), None, (FULL, FULL, FULL)),
    "override": (lambda device: nested(autocast(device), policy.override(RULES)), None, (FULL, LOW, LOW)),
    "override outside": (lambda device: nested(policy.override(RULES), autocast(device)), None, (FULL, LOW, LOW)),
    "torch's": (lambda device: nested(policy.override(RULES), torch.autocast(device.type)), None, (FULL, LOW, LOW)),
    "rules inside": (ruled, lambda device: autocast(device, rules=OTHER), (LOW, FULL, FULL)),
    "off inside": (ruled, lambda device: autocast(device, enabled=False), (FULL, FULL, FULL)),
    "torch's inside": (ruled, lambda device: torch.autocast(device.type), (FULL, LOW, LOW)),
    "override inside": (ruled, lambda device: policy.override(OTHER), (FULL, LOW, LOW)),  # the region's own rules win
    "override of a region inside": (
        ruled, lambda device: nested(policy.override(OTHER), autocast(device)), (LOW, FULL, FULL)
    ),
    "a region inside follows an override": (
        lambda device: nested(autocast(device), policy.override(RULES)), autocast, (FULL, LOW, LOW)
    ),
}  # fmt: skip
"""Regions around the whole and inside of what is checkpointed, and the dtypes that its block sees."""


@pytest.mark.usefixtures("early")
@both
@pytest.mark.parametrize("name", REGIONS)
def test_regions_around_and_inside_of_it(device, low_of, name, reentrant):
    around, inside, expected = REGIONS[name]
    inner = contextlib.nullcontext if inside is None else lambda: inside(device)
    found = same(device, lambda: around(device), inner, reentrant=reentrant)
    assert found == tuple(low_of(device) if dtype is LOW else dtype for dtype in expected)


@pytest.mark.usefixtures("early")
@both
def test_a_backward_pass_inside_another_region_or_on_another_thread(device, low_of, reentrant):
    def elsewhere(loss):
        with autocast(device, rules=OTHER), policy.override(OTHER):
            loss.backward()
            assert torch.tanh(torch.ones(2, device=device)).dtype is FULL  # the rules of this place are back

    def on_a_thread(loss):
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()

    for backward in (elsewhere, on_a_thread):
        found = same(device, lambda: ruled(device), backward=backward, reentrant=reentrant)
        assert found == (FULL, low_of(device), low_of(device))


@pytest.mark.usefixtures("early")
@pytest.mark.parametrize("outer", [False, True])
def test_checkpoints_inside_of_checkpoints(device, low_of, outer):
    _, exact = run(device, lambda: ruled(device))

    def twice(function, x):
        return checkpoint(lambda x: checkpoint(function, x, use_reentrant=False), x, use_reentrant=outer)

    seen, gradients = run(device, lambda: ruled(device), twice)
    assert {dtypes for passes in seen.values() for dtypes in passes} == {(FULL, low_of(device), low_of(device))}
    assert len(seen["first"]) == 3
    assert all(torch.equal(a, b) for a, b in zip(gradients, exact, strict=True))


def test_a_second_pass_that_raises_restores_the_rules(device):
    fails = [False]

    def block(x):
        if fails[0]:
            raise ArithmeticError
        return torch.tanh(x)

    x = torch.rand(4, 4).to(device).requires_grad_()
    with autocast(device, rules=RULES):
        loss = checkpoint(block, torch.nn.Linear(4, 4).to(device)(x).softmax(-1), use_reentrant=False).sum()
    fails[0] = True
    with autocast(device, rules=OTHER):
        with pytest.raises(ArithmeticError):
            loss.backward()
        assert torch.tanh(x).dtype is FULL
    assert regions.current(device.type) is None
    # The kernels that the failed pass holds are released by the next one.
    same(device, lambda: ruled(device))


def test_what_is_saved_is_released_with_the_graph():
    class Part:
        def __call__(self, x):
            return torch.tanh(x)

    part = Part()
    released = weakref.ref(part)
    x = torch.rand(4, requires_grad=True)
    with autocast("cpu", rules=RULES):
        y = checkpoint(part, x, use_reentrant=True).sum()
    y.backward()
    del part, y
    assert released() is None
