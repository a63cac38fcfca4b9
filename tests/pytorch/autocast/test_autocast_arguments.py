"""Arguments of `autocast`: what it takes for a device, what it refuses and in which words."""

from __future__ import annotations

import pytest
import torch

import xla_amp
from xla_amp import autocast
from xla_amp.errors import AutocastWarning, DeviceError, PolicyError, UnsupportedDtypeError


@pytest.mark.parametrize(
    "device", ["xla", "xla:0", "jax", "jax:0", "cpu", "cpu:0", torch.device("cpu"), torch.device("xla")]
)
def test_devices(device):
    expected = "cpu" if "cpu" in str(device) else "jax"
    assert autocast(device).device == autocast(device_type=device).device == expected
    assert autocast(xla_amp.xla_device()).device == "jax"


REFUSED = [
    *(((device,), {}, ValueError, rf"expected a device.*got {type(device).__name__}") for device in (3, None, ["cpu"])),
    *(((text,), {}, ValueError, "expected a device type with an optional index") for text in ("", "cpu:", "cuda:one")),
    *((("qpu",), {}, kind, "torch knows no device type 'qpu'; expected 'cuda'") for kind in (DeviceError, ValueError)),
    (("meta",), {}, RuntimeError, "User specified an unsupported autocast device_type 'meta'"),
    ((), {}, TypeError, "device"),
    (("xla",), {"dtype": torch.float16, "policy": "hpu"}, UnsupportedDtypeError, "'hpu' offers torch.bfloat16, got"),
    (("xla",), {"policy": "tqu"}, PolicyError, "unknown policy 'tqu'; nearest: tpu"),
    (("mtia",), {"policy": "cuda"}, PolicyError, "rules can be changed on cpu, cuda"),
    *(
        (
            (device,),
            {name: value},
            TypeError,
            rf"{name}={value!r}\): expected True or False, got {type(value).__name__}",
        )
        for name, value in (("cache_enabled", "x"), ("enabled", 1), ("enabled", None), ("cache_enabled", 0))
        for device in ("cpu", "xla")
    ),
    *(
        ((device,), {"dtype": dtype}, UnsupportedDtypeError, "expected torch.bfloat16 or torch.float16, got")
        for dtype in (torch.float64, torch.int32, "bfloat16", True)
        for device in ("cpu", "xla")
    ),
]


@pytest.mark.parametrize(("arguments", "options", "kind", "words"), REFUSED)
def test_what_is_refused(arguments, options, kind, words):
    with pytest.raises(kind, match=words):
        autocast(*arguments, **options)


@pytest.mark.parametrize("device", ["xla:99", "jax:7", torch.device("xla", 1)])
@pytest.mark.parametrize("use", [autocast, xla_amp.is_autocast_available, xla_amp.GradScaler])
def test_an_index_of_no_device(use, device):
    with pytest.raises(ValueError, match=r"\('(xla|jax):\d+'\): no such device; expected the index 0 or none"):
        use(device)


def test_an_index_of_no_cuda_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(ValueError, match=r"autocast\('cuda:4'\): no such device; expected the index 0 to 3 or none"):
        autocast("cuda:4")


def generator():
    yield


async def coroutine(): ...


async def asynchronous():
    yield


@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (torch.nn.Linear, r"expects a function, got the class Linear; decorate a method"),
        (dict, r"expects a function, got the class dict; decorate a method"),
        (3, r"expects a function, got 3; decorate a method"),
        (generator, r"generator is suspended meanwhile: write `with autocast"),
        (coroutine, r"coroutine is suspended meanwhile"),
        (asynchronous, r"asynchronous is suspended meanwhile"),
    ],
)
def test_what_is_not_decorated(device, given, words):
    with pytest.raises(TypeError, match=words):
        autocast(device)(given)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without CUDA")
def test_cuda_without_cuda():
    with pytest.raises(DeviceError, match="there is no CUDA device, so autocast would do nothing"):
        autocast("cuda")
    with autocast("cuda", enabled=False):
        assert not torch.is_autocast_enabled("cuda")


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_float32_disables_with_a_warning_as_in_torch(device):
    place = xla_amp.xla_device() if device == "xla" else torch.device("cpu")
    matrix = torch.ones(2, 2, device=place)
    texts = []
    for region in (torch.autocast, autocast):
        with pytest.warns(UserWarning, match="Disabling autocast") as caught:
            off = region(place.type, torch.float32)
        with off:
            assert torch.mm(matrix, matrix).dtype is torch.float32
            assert not torch.is_autocast_enabled(place.type)
        assert [each.filename for each in caught] == [__file__]
        texts.append(str(caught[0].message))
    assert caught[0].category is AutocastWarning
    assert all("torch.bfloat16" in text and "torch.float16" in text for text in texts)
    autocast(device, dtype=torch.float32, enabled=False)  # off anyway, and so without a warning


def test_repr():
    assert repr(autocast("cpu")) == "autocast('cpu')"
    shown = repr(autocast("cpu", torch.float16, cache_enabled=False))
    assert shown == "autocast('cpu', dtype=torch.float16, cache_enabled=False)"
    assert repr(autocast("xla", enabled=False)) == "autocast('jax', enabled=False)"
