"""Operations that the device takes whole instead of torch's composites: attention and recurrent networks."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import assert_same
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as attention

import xla_amp
from xla_amp import lazy as engine
from xla_amp.lazy.graph.tape import nodes
from xla_amp.lazy.graph.trace import trace
from xla_amp.lazy.tensors import tensor_io
from xla_amp.testing import counts as counted

EXACT = {"rtol": 1e-10, "atol": 1e-10}


def recorded() -> list[str]:
    """Names of the operations in the trace."""
    return [node.instruction.name for node in nodes(trace.code) if not node.is_parameter]


def sample(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def operands(where: Any, heads: int = 4) -> list[Tensor]:
    shapes = ((2, 4, 6, 8), (2, heads, 7, 8), (2, heads, 7, 5))
    return [sample(*shape, seed=i).to(where).requires_grad_() for i, shape in enumerate(shapes)]


# -- attention --------------------------------------------------------------------------------------------------------


def mask(where: Any) -> Tensor:
    seen = sample(2, 1, 6, 7, seed=5) > -0.5
    seen[0, 0, 2] = False
    return seen.to(where)


CALLS: dict[str, Callable[[list[Tensor], str], Tensor]] = {
    "plain": lambda q, where: attention(*q) + 0 * q[0].sum(),
    "causal": lambda q, where: attention(*q, is_causal=True, scale=0.2),
    "mask": lambda q, where: attention(*q, attn_mask=mask(where)),
    "bias": lambda q, where: attention(*q[:3], attn_mask=q[3]),
    "shared keys": lambda q, where: attention(*q, enable_gqa=True, is_causal=True),
    "three dimensions": lambda q, where: attention(*(x[0] for x in q)),
    "the kernel of torch's CPU": lambda q, where: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *q[:2], q[2].repeat(1, 1, 1, 2)[..., :8], 0.0, True
    )[0],
    "transposed": lambda q, where: attention(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in q)),
}


def test_attention(device):
    def with_gradients(where: str, call: Callable[[list[Tensor], str], Tensor]) -> Any:
        q = operands(where, 2 if call is CALLS["shared keys"] else 4)
        if call is CALLS["bias"]:
            q.append(sample(6, 7, seed=6).to(where).requires_grad_())
        y = call(q, where)
        return y, torch.autograd.grad(y, q, sample(*y.shape, seed=7).to(where))

    assert_same(lambda where: {name: with_gradients(where, call) for name, call in CALLS.items()}, **EXACT)


def test_attention_is_one_operation_each_way(device):
    q = operands(device)
    y = attention(*q, attn_mask=mask(device))
    names = recorded()
    assert [name for name in names if "attention" in name] == ["_scaled_dot_product_fused_attention_overrideable"]
    torch.autograd.grad(y, q, y.detach())
    added = recorded()[len(names) :]
    assert added == ["_scaled_dot_product_fused_attention_overrideable_backward"]


def test_the_user_may_choose_the_composite(device):
    with sdpa_kernel(SDPBackend.MATH):
        attention(*operands(device))
    assert not any("attention" in name for name in recorded())


def test_attention_can_be_differentiated_twice(device):
    def program(where: str) -> Any:
        q = operands(where)
        with sdpa_kernel(SDPBackend.MATH if where == "cpu" else SDPBackend.OVERRIDEABLE):
            y = attention(*q, is_causal=True)
            gradients = torch.autograd.grad(y.pow(2).sum(), q, create_graph=True)
        return torch.autograd.grad(sum(g.pow(2).sum() for g in gradients), q)

    assert_same(program, rtol=1e-9, atol=1e-9)
    q = operands(device)
    dropped = attention(*q, dropout_p=0.5).pow(2).sum()
    with pytest.raises(RuntimeError, match="differentiated twice"):
        torch.autograd.grad(dropped, q, create_graph=True)


def test_dropout_of_attention_follows_the_generator(device):
    q = operands(device)

    def run() -> tuple[Tensor, ...]:
        engine.manual_seed(3)
        y = attention(*q, dropout_p=0.4)
        return y, *torch.autograd.grad(y, q, torch.ones_like(y))

    first, again = run(), run()
    other = attention(*q, dropout_p=0.4)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert not torch.equal(first[0], other)
    state = engine.get_rng_state()
    attention(*q)  # without dropout no number is drawn
    assert torch.equal(engine.get_rng_state(), state)


def test_transforms_see_the_composite(device):
    q = sample(2, 1, 2, 3, 4).to(device)
    per_sample = torch.func.vmap(torch.func.grad(lambda x: attention(x, x, x).pow(2).sum()))
    _, tangent = torch.func.jvp(lambda x: attention(x, x, x), (q[0],), (q[1],))
    got = per_sample(q).cpu(), tangent.cpu()
    with sdpa_kernel(SDPBackend.MATH):
        _, tangent = torch.func.jvp(lambda x: attention(x, x, x), (q[0].cpu(),), (q[1].cpu(),))
        want = per_sample(q.cpu()), tangent
    torch.testing.assert_close(got, want, **EXACT)


# -- linear layers ----------------------------------------------------------------------------------------------------

LINEAR: dict[str, tuple[Any, ...]] = {
    "vector": ((4,), (5, 4), (5,)),
    "matrix": ((3, 4), (5, 4), (5,)),
    "three dimensions": ((2, 3, 4), (5, 4), None),
    "four dimensions": ((2, 3, 2, 4), (5, 4), (5,)),
    "one bias": ((2, 3, 4), (5, 4), ()),
    "biases of rows": ((3, 4), (5, 4), (3, 5)),
    "weight of one dimension": ((2, 3, 4), (4,), None),
    "no rows": ((2, 0, 4), (5, 4), (5,)),
    "no columns": ((3, 0), (5, 0), (5,)),
    "no results": ((2, 3, 4), (0, 4), (0,)),
}


def test_the_gradient_of_running_products_reads_nothing(device):
    def program(where: str) -> Any:
        x = sample(3, 5, seed=3)
        x[0, 2] = x[1, 1] = x[1, 4] = 0
        x = x.to(where).requires_grad_()
        (gradient,) = torch.autograd.grad(x.cumprod(1), x, sample(3, 5, seed=4).to(where), create_graph=True)
        return gradient, *torch.autograd.grad(gradient.square().sum(), x)

    assert_same(program, **EXACT)
    with counted() as counts:
        program(device)
        engine.sync()
    assert counts.host_syncs == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_linear_layers(dtype, device):
    def derivatives(where: str, shapes: tuple[Any, ...], turned: bool) -> Any:
        tensors = [sample(*shape, seed=i).to(where, dtype) for i, shape in enumerate(shapes) if shape is not None]
        x, *rest = [tensor.requires_grad_() for tensor in tensors]
        y = torch.nn.functional.linear(x.mT.contiguous().mT if turned else x, *rest)
        first = torch.autograd.grad(y.abs().square().sum(), [x, *rest], create_graph=True)
        total = torch.stack([gradient.abs().square().sum() for gradient in first]).sum()
        return y, first, torch.autograd.grad(total, [x, *rest])

    def all_of_them(where: str) -> Any:
        turned = [(name, True) for name, shapes in LINEAR.items() if len(shapes[0]) > 1]
        cases = [*turned, *((name, False) for name in LINEAR)]
        return {case: derivatives(where, LINEAR[case[0]], case[1]) for case in cases}

    assert_same(all_of_them, **EXACT)


def test_a_linear_layer_is_one_operation_each_way(device):
    x, weight, bias = (sample(*shape).to(device).requires_grad_() for shape in ((2, 3, 4), (5, 4), (5,)))
    torch.nn.functional.linear(x, weight, bias).backward(torch.ones(2, 3, 5, dtype=torch.float64).to(device))
    assert recorded() == ["linear", "linear_backward"]


# -- layers under autocast: the casts of their operands are part of them ----------------------------------------------

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 5),
    "no bias": lambda: nn.Linear(4, 5, bias=False),
    "conv1d": lambda: nn.Conv1d(4, 6, 3, padding=1, stride=2),
    "conv2d": lambda: nn.Conv2d(4, 6, 2, groups=2, dilation=2, bias=False),
    "conv3d": lambda: nn.Conv3d(4, 2, 1),
    "padding by name": lambda: nn.Conv1d(4, 4, 3, padding="same"),
    "computed weight": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)),
}
_SIZES = {"conv1d": (2, 4, 6), "padding by name": (2, 4, 6), "conv2d": (2, 4, 5, 5), "conv3d": (2, 4, 2, 2, 2)}


def _use(name: str, where: str, frozen: bool = False, dtype: torch.dtype = torch.float32) -> tuple[Any, Tensor, Tensor]:
    torch.manual_seed(0)
    layer, x = LAYERS[name](), sample(*_SIZES.get(name, (3, 4))).to(dtype)
    layer, x = layer.to(where), x.to(where).requires_grad_()
    if frozen:
        layer.requires_grad_(False)
    with xla_amp.autocast(where, dtype=torch.bfloat16):
        return layer, x, layer(x)


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_under_autocast_gives_the_gradients_of_its_parameters(name, device):
    def gradients(where: str, frozen: bool, dtype: torch.dtype) -> Any:
        layer, x, y = _use(name, where, frozen, dtype)
        assert y.dtype is torch.bfloat16
        y.float().square().sum().backward()
        return y, x.grad, [p.grad for p in layer.parameters() if not frozen]

    for frozen, dtype in ((False, torch.float32), (True, torch.float32), (False, torch.bfloat16)):
        assert_same(lambda where: gradients(where, frozen, dtype), rtol=0.05, atol=0.05)  # noqa: B023


@pytest.mark.parametrize("name", ["linear", "conv2d"])
def test_a_layer_under_autocast_is_one_operation_of_autograd(name, device):
    layer, x, y = _use(name, device)
    operation = "linear" if name == "linear" else "convolution"
    casts = ["_to_copy"] * (1 + len(list(layer.parameters())))
    assert recorded() == [*casts, operation]
    assert {type(node).__name__ for node, _ in y.grad_fn.next_functions if node is not None} == {"AccumulateGrad"}
    y.backward(torch.ones_like(y))
    assert recorded()[len(casts) + 2 :] == [f"{operation}_backward", *casts]
    with torch.no_grad(), xla_amp.autocast(device, dtype=torch.bfloat16):
        assert not layer(x).requires_grad


@pytest.mark.parametrize("name", ["linear", "conv2d"])
def test_a_layer_under_autocast_can_be_differentiated_twice(name, device):
    def derivatives(where: str) -> Any:
        layer, x, y = _use(name, where)
        tensors = [x, *layer.parameters()]
        first = torch.autograd.grad(y.float().square().sum(), tensors, create_graph=True)
        total = torch.stack([gradient.square().sum() for gradient in first]).sum()
        return torch.autograd.grad(total, tensors)

    assert_same(derivatives, rtol=0.1, atol=2.0)
    (second, *_), (cpu, *_) = derivatives(device), derivatives("cpu")
    assert (second.cpu() - cpu).norm() < 0.03 * cpu.norm()


def test_a_layer_under_autocast_keeps_the_casts_only(device):
    def program(where: str) -> Any:
        layer, x, y = _use("linear", where)
        with torch.no_grad():
            layer.weight.mul_(0)  # as an optimizer's step before the backward pass
            x.mul_(0)
        y.float().sum().backward()
        return x.grad, layer.weight.grad

    assert_same(program, rtol=0.05, atol=0.05)
    x = sample(3, 4).float().to(device).requires_grad_() + 1
    kept = weakref.ref(tensor_io.buffer_of(x))
    with xla_amp.autocast(device, dtype=torch.bfloat16):
        y = nn.Linear(4, 5, device=device)(x)
    del x
    xla_amp.sync()
    assert y.requires_grad
    assert kept() is None


def test_transforms_see_the_casts_of_a_layer(device):
    def derivatives(where: str) -> Any:
        weight, x = sample(5, 4).float().to(where), sample(3, 4).float().to(where)

        def loss(weight: Tensor, x: Tensor) -> Tensor:
            with xla_amp.autocast(where, dtype=torch.bfloat16):
                return torch.nn.functional.linear(x, weight).float().square().sum()

        with xla_amp.autocast(where, dtype=torch.bfloat16):
            y = torch.nn.functional.linear(x.requires_grad_(), weight.requires_grad_())
        several = torch.eye(3, dtype=torch.bfloat16).to(where)[:, :, None].expand(3, 3, 5)
        batched = torch.autograd.grad(y, (x, weight), several, is_grads_batched=True)
        weight, x = weight.detach(), x.detach()
        return torch.func.vmap(torch.func.grad(loss), (None, 0))(weight, x), batched

    assert_same(derivatives, rtol=0.05, atol=0.05)


def test_inference_mode(device):
    @torch.inference_mode()
    def program(where: str) -> Any:
        torch.manual_seed(0)
        lstm = nn.LSTM(8, 3).double().to(where)
        return attention(*(x.detach() for x in operands(where))), lstm(sample(4, 2, 8).to(where))

    assert_same(program, **EXACT)


# -- modules ----------------------------------------------------------------------------------------------------------

SEQUENCE = sample(6, 3, 5)


def test_gradients_of_one_result_of_a_cell(device):
    def program(where: str) -> Any:
        torch.manual_seed(0)
        cell = nn.LSTMCell(5, 4).double().to(where)
        sums = [state.sum() for state in cell(SEQUENCE[0].to(where))]
        return [torch.autograd.grad(each, cell.parameters(), retain_graph=True) for each in sums]

    assert_same(program, **EXACT)


def test_a_layer_is_one_operation_however_long_the_sequence(device):
    lengths = []
    network = nn.LSTM(5, 4).double().to(device)
    for length in (4, 40):
        engine.sync()
        outputs, _ = network(sample(length, 3, 5).to(device))
        outputs.sum().backward()
        names = recorded()
        assert names.count("xla_amp.recurrent_layer") == names.count("xla_amp.recurrent_layer_backward") == 1
        lengths.append(len(names))
    assert lengths[0] <= lengths[1] + 1  # the first backward pass creates the gradients
    assert lengths[1] < 40


def test_autocast_reaches_the_whole_layer(device):
    network = nn.LSTM(5, 4, num_layers=2).to(device)
    x = SEQUENCE.float().to(device)
    with xla_amp.autocast(device, dtype=torch.bfloat16):
        outputs, (hidden, cells) = network(x)
    assert {outputs.dtype, hidden.dtype, cells.dtype} == {torch.bfloat16}
    outputs.float().sum().backward()
    assert all(p.grad.dtype is torch.float32 for p in network.parameters())


PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
TOKENS = sample(2, 5, 8)


def test_an_encoder_layer_in_inference_is_low_under_autocast(device):
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).to(device)
    tokens = TOKENS.float().to(device)
    with torch.no_grad(), xla_amp.autocast(device):
        trained, inferred = layer.train()(tokens), layer.eval()(tokens)
    with torch.no_grad():
        wide = layer(tokens)
    assert inferred.dtype is trained.dtype
    assert torch.equal(inferred.cpu(), trained.cpu())
    assert not torch.equal(inferred.cpu().float(), wide.cpu())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_padded_encoder_in_inference(device):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).double().eval()
    with torch.no_grad():
        want = encoder(TOKENS, src_key_padding_mask=PADDING)
        got = copy.deepcopy(encoder).to(device)(TOKENS.to(device), src_key_padding_mask=PADDING.to(device)).cpu()
    torch.testing.assert_close(got[~PADDING], want[~PADDING], **EXACT)
    assert not want[PADDING].any()  # torch's nested tensors; docs/limits.md
    assert got[PADDING].all()
