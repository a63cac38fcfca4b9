"""Convolutions of what a ReLU gave, and batch norms of what a convolution gave, under autocast: they cast it
themselves, and nobody can tell but by counting."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

import xla_amp
from xla_amp.lazy.graph.trace import tape
from xla_amp.lazy.runtime import compile

LOW = torch.bfloat16
CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def relu(x):
    """In place, as in most networks of convolutions: the policy has a rule for the other form."""
    return x.clone().relu_()


class Layers(nn.Module):
    """An activation and a convolution of its result."""

    def __init__(self, dims=2, activation=relu, bias=False):
        super().__init__()
        torch.manual_seed(dims)
        self.convolution = CONVOLUTIONS[dims](4, 6, 3, padding=1, bias=bias)
        self.activation = activation
        self.x = nn.Parameter(torch.randn(2, 4, *[7] * dims))

    def forward(self):
        return self.convolution(self.activation(self.x))

    def gradients(self):
        return [each.grad.cpu() for each in self.parameters()]


def on_device(**options):
    layers = Layers(**options).to(xla_amp.xla_device())
    xla_amp.sync()
    return layers


def region(low=LOW):
    return xla_amp.autocast(xla_amp.xla_device(), dtype=low)


def casts():
    """How many casts have been recorded since the last cut."""
    return Counter(instruction.name for instruction, _, _ in compile.steps(tape.code))["_to_copy"]


@pytest.mark.parametrize("activation", [relu, torch.sigmoid, torch.tanh])
@pytest.mark.parametrize("dims", CONVOLUTIONS)
def test_is_what_torch_gives(dims, activation):
    ours, theirs = on_device(dims=dims, activation=activation), Layers(dims, activation)
    with region():
        y = ours()
    assert casts() == 1, "the weight"
    with torch.autocast("cpu", LOW):
        z = theirs()
    for loss in (y, z):
        loss.float().square().sum().backward()
    for one, other in zip((y.cpu(), *ours.gradients()), (z, *theirs.gradients()), strict=True):
        assert one.dtype is other.dtype
        # Rounding to bfloat16 is 2**-9 of a value; products of float32 would differ by several of these.
        torch.testing.assert_close(one, other, rtol=2**-7, atol=2**-8 * other.abs().max().item())


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_is_bitwise_what_casts_by_hand_give(low):
    ours, theirs = on_device(), on_device()
    with region(low):
        y = ours()
    x, convolution = theirs.activation(theirs.x), theirs.convolution
    z = torch.conv2d(x.to(low), convolution.weight.to(low), padding=1)
    for loss in (y, z):
        (loss.float().square().sum() * 5000).backward()
    # In float16 some of the gradients are beyond its range.
    assert (low is torch.float16) == any(bool(gradient.isinf().any()) for gradient in ours.gradients())
    for one, other in zip((y.cpu(), *ours.gradients()), (z.cpu(), *theirs.gradients()), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def assert_as_torch(train, tolerance, **options):
    """Gradients that ``train(layers, region)`` gives here and on the CPU, within a part of the largest of each."""
    theirs = train(Layers(), torch.autocast("cpu", LOW, **options))
    for one, other in zip(train(on_device(), region()), theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance * other.abs().max().item())


def test_one_result_for_several_convolutions():
    def train(layers, region):
        for step in range(2):
            with region:
                shared = layers.activation(layers.x)
                y = layers.convolution(shared) + layers.convolution(shared * step) + layers.convolution(shared)
            (y.float() + shared[:, :1]).square().sum().backward()
        return layers.gradients()

    assert_as_torch(train, 2**-6, cache_enabled=False)


def test_gradient_of_a_gradient():
    def penalty(layers, region):
        with region:
            y = layers()
        (gradient,) = torch.autograd.grad(y.float().square().sum(), layers.x, create_graph=True)
        gradient.square().sum().backward()
        return layers.gradients()

    assert_as_torch(penalty, 2**-6)


def test_weights_may_change_before_the_backward_pass():
    """As torch: the convolution keeps its weight as it was cast, so that a step in between does no harm."""

    def train(layers, region):
        with region:
            y = layers()
        with torch.no_grad():
            layers.convolution.weight.mul_(3)
        y.float().square().sum().backward()
        return layers.gradients()

    assert_as_torch(train, 2**-7)


def test_two_dtypes_are_an_error_outside():
    layers = on_device()
    with region():
        layers()  # the same two dtypes, where they are right
    x, weight = layers.activation(layers.x), layers.convolution.weight.to(LOW)
    for given in (x, x.detach()):
        with pytest.raises(RuntimeError, match=r"expected input and weight .*same dtype, but input is torch\.float32"):
            torch.conv2d(given, weight)
    with region(), pytest.raises(RuntimeError, match="same dtype"):
        layers.convolution(relu(x.double()))  # float64 is never cast


def shows_every_cast(run):
    run()
    return casts() == 2


def test_hooks_are_shown_what_is_kept():
    layers, seen = on_device(), []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda each: seen.append(each.dtype) or each, lambda each: each)
    with hooks, region():
        assert shows_every_cast(layers)
    assert Counter(seen) == {torch.float32: 1, LOW: 2}


def test_explanation_shows_the_cast():
    layers = on_device()
    with xla_amp.explain() as told, region():
        assert shows_every_cast(layers)
    assert "bfloat16" in str(told)


@pytest.mark.parametrize("activation", [torch.abs, nn.functional.silu, torch.detach])
def test_what_nobody_else_keeps_is_kept_low(activation):
    layers = on_device(activation=activation)
    with region():
        assert shows_every_cast(layers)


def test_with_a_bias_everything_is_cast():
    layers, theirs = on_device(bias=True), Layers(bias=True)
    with region():
        y = layers()
    assert casts() == 3
    with torch.autocast("cpu", LOW):
        torch.testing.assert_close(y.cpu(), theirs(), rtol=2**-7, atol=2**-8)


def test_transforms_see_torchs_operations():
    def loss(x, weight):
        return torch.conv2d(x.sigmoid(), weight, padding=1).float().square().sum()

    def gradients(where, region):
        torch.manual_seed(0)
        x, weight = torch.randn(3, 2, 4, 7, 7).to(where), torch.randn(6, 4, 3, 3).to(where)
        with region:
            return torch.func.vmap(torch.func.grad(loss), (0, None))(x, weight).cpu()

    theirs = gradients("cpu", torch.autocast("cpu", LOW))
    ours = gradients(xla_amp.xla_device(), region())
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2**-6 * theirs.abs().max().item())


def test_checkpoint_recomputes_the_same():
    one, other = on_device(), on_device()
    with region():
        y = torch.utils.checkpoint.checkpoint(one, use_reentrant=False)
        z = other()
    for loss in (y, z):
        loss.float().square().sum().backward()
    assert all(map(torch.equal, one.gradients(), other.gradients()))


# -- batch norm -------------------------------------------------------------------------------------------------------


class Normalized(nn.Module):
    """A convolution and a batch norm of its result."""

    def __init__(self, dims=2, batch=5, **options):
        super().__init__()
        torch.manual_seed(dims)
        self.convolution = CONVOLUTIONS[dims](4, 6, 3, padding=1)
        self.norm = getattr(nn, f"BatchNorm{dims}d")(6, **options)
        with torch.no_grad():
            for parameter in self.norm.parameters():
                parameter.uniform_(0.5, 2)
        self.x = nn.Parameter(torch.randn(batch, 4, *[7] * dims))

    def forward(self, by_hand=None):
        if by_hand is None:
            return self.norm(self.convolution(self.x))
        low = self.x.to(by_hand), self.convolution.weight.to(by_hand), self.convolution.bias.to(by_hand)
        return self.norm(getattr(torch, f"conv{self.x.dim() - 2}d")(*low, padding=1).float())

    def everything(self):
        return [each.grad.cpu() for each in self.parameters()] + [each.cpu() for each in self.buffers()]


def normalized(**options):
    layers = Normalized(**options).to(xla_amp.xla_device())
    xla_amp.sync()
    return layers


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dims", CONVOLUTIONS)
def test_batch_norm_is_bitwise_what_a_cast_by_hand_gives(dims, training, low):
    ours, theirs = normalized(dims=dims).train(training), normalized(dims=dims).train(training)
    for _ in range(2):  # the second with running statistics
        with region(low):
            y = ours()
        assert casts() == 3, "the convolution's operands"
        z = theirs(by_hand=low)
        assert y.dtype is torch.float32
        for loss in (y, z):
            (loss.square().sum() * 100).backward()
        assert torch.equal(y.cpu(), z.cpu())
    assert all(map(torch.equal, ours.everything(), theirs.everything()))


def test_gradient_of_a_batch_norms_gradient():
    def penalty(layers, region):
        with region:
            y = layers()
        (gradient,) = torch.autograd.grad((y**3).sum(), layers.x, create_graph=True)
        gradient.square().sum().backward()
        # Not those of the biases, in which is nothing but rounding errors: what they add is taken off again.
        return [each.grad.cpu() for each in (layers.x, layers.convolution.weight, layers.norm.weight)]

    ours, theirs = penalty(normalized(), region()), penalty(Normalized(), torch.autocast("cpu", enabled=False))
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype is other.dtype
        torch.testing.assert_close(one, other, rtol=0, atol=0.02 * other.abs().max().item())


@pytest.mark.parametrize("options", [{"affine": False}, {"batch": 0}])
def test_batch_norm_casts_where_no_weight_says_the_dtype_and_where_nothing_is_there(options):
    layers = normalized(**options)
    with region():
        y = layers()
    assert (y.dtype, casts()) == (torch.float32, 4)
    assert y.sum().item() == pytest.approx(0, abs=1e-3)


def test_batch_norm_in_a_low_dtype_outside_keeps_it():
    """What is another meaning of the same two dtypes: torch gives the input's."""
    layers, theirs = normalized(), Normalized()
    with region():
        layers()  # the same two dtypes, where the result is float32
    given = torch.randn(5, 6, 7, 7, dtype=LOW)
    for norm in (layers.norm, theirs.norm):
        norm.reset_running_stats()
        x = given.to(norm.weight.device, copy=True).requires_grad_()
        y = norm(x)
        assert y.dtype is LOW
        (gradient,) = torch.autograd.grad(y.float().square().sum(), x)
        found = [y.cpu(), gradient.cpu(), norm.running_var.cpu()]
        if norm is layers.norm:
            expected = found
    for one, other in zip(expected, found, strict=True):
        assert one.dtype is other.dtype
        torch.testing.assert_close(one, other, rtol=2**-6, atol=2**-8 * other.abs().max().item())


def test_hooks_and_explanations_show_a_batch_norms_cast():
    layers, seen = normalized(), []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda each: seen.append(each.dtype) or each, lambda each: each)
    with hooks, region():
        layers()
    assert casts() == 4
    assert seen.count(LOW) == 2, "what the convolution keeps"
    with xla_amp.explain(), region():
        layers()
    assert casts() == 8


@pytest.mark.parametrize("name", ["weight", "bias", "running_mean", "running_var"])
def test_batch_norm_says_what_size_is_wrong(name):
    layers = normalized()
    with torch.no_grad():
        setattr(layers.norm, name, None)
        wrong = torch.ones(4, device=xla_amp.xla_device())
        setattr(layers.norm, name, nn.Parameter(wrong) if name in ("weight", "bias") else wrong)
    for way in (region(), torch.no_grad()):
        with way, pytest.raises(RuntimeError, match=f"{name} should contain 6 elements not 4"):
            layers.norm(layers.convolution(layers.x))
