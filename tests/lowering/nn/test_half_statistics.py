"""Statistics of half values are those of float32: the result is that of float64, rounded once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

import xla_amp

CALLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "layer_norm": lambda x: F.layer_norm(x, [256]),
    "group_norm": lambda x: F.group_norm(x.view(4, 16, 16), 4),
    "batch_norm": lambda x: F.batch_norm(x.view(4, 4, 64), None, None, training=True),
    "instance_norm": lambda x: F.instance_norm(x.view(4, 4, 64)),
    "rms_norm": lambda x: F.rms_norm(x, [256]),
    "softmax": lambda x: F.softmax(x / 8, -1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "logsumexp": lambda x: torch.logsumexp(x / 50, -1),  # its gradient reads the rounded result
    "sum": lambda x: x.sum(-1),
    "mean": lambda x: x.mean(-1),
    "var": lambda x: x.var(-1),
    "cumsum": lambda x: x.cumsum(-1),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_the_result_is_rounded_once(name: str, dtype: torch.dtype) -> None:
    """The mean, 50, is far from zero: a difference from a rounded mean is wrong in the second digit."""
    torch.manual_seed(0)
    x = (torch.randn(4, 256) * 3 + 50).to(dtype)
    grad = torch.randn(CALLS[name](x.double()).shape)
    found = []
    for each in (x.to(xla_amp.xla_device()), x.double()):
        leaf = each.detach().requires_grad_()
        y = CALLS[name](leaf)
        y.backward(grad.to(y))
        assert leaf.grad is not None
        found.append((y.detach().cpu().double(), leaf.grad.cpu().double()))
    (got, slope), (wanted, expected) = found
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(got, wanted, rtol=0.51 * step, atol=1e-5)
    # the gradient starts from the rounded `grad`, and from a result that was rounded where torch saves it
    torch.testing.assert_close(slope, expected, rtol=4 * step, atol=4 * step * float(expected.abs().max()))
