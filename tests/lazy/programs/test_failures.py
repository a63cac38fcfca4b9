"""Failures raise clear errors where they happen, and leave other tensors intact."""

from __future__ import annotations

import io
import json
import sys
import textwrap
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import forked
import jax.numpy as jnp
import pytest
import torch
from harness import array_behind

from xla_amp import lazy as engine
from xla_amp import lowering
from xla_amp.errors import DeviceError, MissingLoweringError, StepFailedError, XlaAmpError
from xla_amp.lazy.programs import execute
from xla_amp.testing import counts as counted

LIBRARY = torch.library.Library("lazy_failures", "DEF")
broken = True
"""Whether the lowering of ``lazy_failures::sometimes`` raises."""


@pytest.fixture(scope="session", autouse=True)
def _operations() -> None:
    for name in ("sometimes", "wrong_size", "unknown", "unknown_in_place"):
        alias = "(a!)" if name == "unknown_in_place" else ""
        LIBRARY.define(f"{name}(Tensor{alias} x) -> Tensor{alias}")
        LIBRARY.impl(name, lambda x: x if x.device.type == "meta" else x.add_(1), "CPU")
        LIBRARY.impl(name, lambda x: torch.empty_like(x), "Meta")

    @lowering.register("lazy_failures::sometimes")
    def sometimes(x: Any) -> Any:
        if broken:
            raise ArithmeticError("no such luck")
        return x * 2

    @lowering.register("lazy_failures::wrong_size")
    def wrong_size(x: Any) -> Any:
        return jnp.zeros((2, 2))


def sometimes(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.lazy_failures.sometimes(x)


# ---- at the operation ------------------------------------------------------------------------------------------------


def test_a_shape_error_is_raised_where_it_is_and_changes_nothing(device: torch.device) -> None:
    x, y = torch.ones(3).to(device), torch.zeros(3).to(device)
    y.add_(x)
    for mistake in (
        lambda: x + torch.ones(4).to(device),
        lambda: y.add_(torch.ones(4).to(device)),
        lambda: torch.mm(x.view(3, 1), x.view(3, 1)),
        lambda: torch.cat([x.view(3, 1), x.view(1, 3)]),
        lambda: y.copy_(torch.ones(2).to(device)),
        lambda: torch.nn.functional.linear(x, torch.ones(2, 4).to(device)),
    ):
        with pytest.raises(RuntimeError, match=r"size|shape|broadcast|dim"):
            mistake()
    with pytest.raises(IndexError):
        x.sum(2)
    y.add_(x)
    with counted() as counts:
        assert y.tolist() == [2, 2, 2]
    assert counts.executions == 1
    assert x.tolist() == [1, 1, 1]


def test_tensors_of_two_devices(device: torch.device) -> None:
    x, host = torch.ones(3).to(device), torch.ones(3)
    for mistake in (
        lambda: x + host,
        lambda: host + x,
        lambda: x.add_(host),
        lambda: torch.mm(x.view(1, 3), host.view(3, 1)),
        lambda: torch.cat([x, host]),
        lambda: torch._foreach_add([x], [host]),
        lambda: torch.nn.functional.linear(x, torch.ones(2, 3)),
        lambda: torch.where(x > 0, x, host),
        lambda: torch.add(x, x, out=host),
        lambda: torch.tensor(1.0).add_(x[0]),
        lambda: torch._foreach_add_([torch.tensor(1.0)], [x[0]]),
    ):
        with pytest.raises(RuntimeError, match=r"[Ee]xpected all tensors to be on the same device"):
            mistake()
    assert host.tolist() == [1, 1, 1]
    with pytest.raises(DeviceError, match=r"jax:0 and cpu: a tensor of shape \[3\] .* is on cpu\. Move it"):
        x * host
    assert (x * host.to(device)).tolist() == [1, 1, 1]


def test_a_device_that_does_not_exist(device: torch.device) -> None:
    x = torch.ones(2)
    for mistake in (
        lambda: x.to("jax:1"),
        lambda: torch.ones(2, device="jax:3"),
        lambda: torch.empty(2, device="jax:1"),
        lambda: torch.tensor([1.0], device="jax:1"),
        lambda: torch.randn(2, device="jax:1"),
        lambda: torch.arange(2, device="jax:1"),
        lambda: torch.nn.Linear(2, 2).to("jax:1"),
    ):
        with pytest.raises((DeviceError, RuntimeError), match=r"jax:[13] does not exist.*'jax:0'|Couldn't swap"):
            mistake()
    assert torch.ones(2, device="jax:0").device == torch.ones(2, device="jax").device == device


@pytest.mark.skipif(find_spec("torch_xla") is not None, reason="torch_xla has the device 'xla'")
def test_torch_xlas_device_is_refused_with_what_to_write(device: torch.device) -> None:
    saved = io.BytesIO()
    torch.save(torch.ones(2), saved)
    for mistake in (
        lambda: torch.zeros(2, device="xla"),
        lambda: torch.arange(3, device=torch.device("xla", 0)),
        lambda: torch.rand_like(torch.ones(2), device="xla"),
        lambda: torch.nn.Linear(2, 2, device="xla"),
        lambda: torch.ones(2).to("xla:0"),
        lambda: torch.load(io.BytesIO(saved.getvalue()), map_location="xla"),
    ):
        with pytest.raises(DeviceError, match=r"write (map_location=)?xla_amp\.xla_device\(\) or 'jax'"):
            mistake()


def test_data_parallel_runs_the_module_where_it_is(device: torch.device) -> None:
    module, x = torch.nn.Linear(4, 2), torch.ones(3, 4)
    want = module(x)
    parallel = torch.nn.DataParallel(module, device_ids=[0])
    torch.testing.assert_close(parallel(x), want)
    parallel.to(device)(x.to(device)).sum().backward()
    assert module.weight.grad.device == device
    assert list(parallel.state_dict()) == ["module.weight", "module.bias"]


def test_a_dtype_that_does_not_exist(device: torch.device) -> None:
    with pytest.raises(XlaAmpError, match=r"torch\.complex32 does not exist on the device 'jax'; legal: torch"):
        torch.ones(2, dtype=torch.float32).to(device).to(torch.complex32)
    with pytest.raises(XlaAmpError, match=r"torch\.float8_e8m0fnu does not exist"):
        torch.empty(2, dtype=torch.float8_e8m0fnu, device=device)


# ---- operations without a lowering -----------------------------------------------------------------------------------


def test_an_operation_without_a_lowering_says_what_to_do(device: torch.device) -> None:
    x = torch.ones(3).to(device)
    with pytest.raises(MissingLoweringError) as caught:
        torch.ops.lazy_failures.unknown(x)
    text = str(caught.value)
    assert "the operation lazy_failures.unknown has no lowering" in text
    assert '@xla_amp.lowering.register("lazy_failures::unknown")' in text
    assert "XLA_AMP_FALLBACK=cpu" in text
    assert isinstance(caught.value, NotImplementedError)
    assert (x + 1).tolist() == [2, 2, 2]


def test_the_advice_names_the_functional_form(device: torch.device) -> None:
    LIBRARY.define("parts(Tensor x) -> Tensor")
    LIBRARY.define("parts.number(Tensor x, Scalar k) -> Tensor")
    LIBRARY.define("parts_.number(Tensor(a!) x, Scalar k) -> Tensor(a!)")
    LIBRARY.define("parts.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
    LIBRARY.define("parts.number_out(Tensor x, Scalar k, *, Tensor(a!) out) -> Tensor(a!)")
    x, out, operations = torch.ones(3).to(device), torch.ones(3).to(device), torch.ops.lazy_failures
    for form, functional, call in (
        ("parts.out", "parts", lambda: operations.parts.out(x, out=out)),
        ("parts_.number", "parts.number", lambda: operations.parts_.number(x, 2)),
        ("parts.number_out", "parts.number", lambda: operations.parts.number_out(x, 2, out=out)),
    ):
        with pytest.raises(MissingLoweringError) as caught:
            call()
        assert f'register("lazy_failures::{functional}")' in str(caught.value)
        assert f"the operation lazy_failures.{form} has no lowering" in str(caught.value)


def test_the_advice_works(device: torch.device) -> None:
    LIBRARY.define("advised(Tensor x, Scalar k) -> Tensor")
    LIBRARY.impl("advised", lambda x, k: torch.empty_like(x), "Meta")
    x = torch.ones(3).to(device)
    with pytest.raises(MissingLoweringError):
        torch.ops.lazy_failures.advised(x, 2)

    @lowering.register("lazy_failures::advised")
    def advised(x: Any, k: Any) -> Any:
        return x * k + 1

    with counted() as counts:
        assert [torch.ops.lazy_failures.advised(x, k)[0].item() for k in (2.0, 3.5)] == [3, 4.5]
    assert counts.compilations == 1
    with pytest.raises(ValueError, match=r"already has a lowering.*override=True"):
        lowering.register("lazy_failures::advised")(advised)


DECOMPOSED: dict[str, Callable[[torch.Tensor], Any]] = {
    "logaddexp": lambda x: torch.logaddexp(x, x.t()),
    "nan_to_num": lambda x: torch.nan_to_num(x / 0, 1.0),
    "linalg_cross": lambda x: torch.linalg.cross(x, x.t()),
    "xlogy.Tensor": lambda x: torch.xlogy(x, x.t()),
    "in place": lambda x: x.clone().sinc_().nan_to_num_(0.5),
    "into a view": lambda x: x.clone()[1:].xlogy_(x[:2]),
    "out": lambda x: torch.logaddexp2(x, x, out=torch.empty(0, device=x.device)),
    "out of two": lambda x: torch.stack(torch.aminmax(x, dim=0, out=(x.new_empty(0), x.new_empty(3)))),
    "out of a factory": lambda x: torch.linspace(0, 1, 5, out=x.new_empty(5)),
    "a factory": lambda x: torch.eye(3, 4, device=x.device, dtype=torch.int32),
    "a gradient": lambda x: torch.func.grad(lambda y: torch.logit(y.sigmoid(), 0.1).square().sum())(x),
    "of integers": lambda x: torch.count_nonzero(x.long(), 0),
}


@pytest.mark.parametrize("name", DECOMPOSED)
def test_an_operation_without_a_lowering_runs_by_torchs_decomposition(device: torch.device, name: str) -> None:
    x = torch.linspace(-1, 2, 9).view(3, 3)
    want = DECOMPOSED[name](x)
    with counted() as counts:
        got = DECOMPOSED[name](x.to(device))
        torch.testing.assert_close(got.cpu(), want, equal_nan=True)
    assert (counts.executions, counts.fallbacks) == (1, 0)
    if hasattr(torch.ops.aten, name.partition(".")[0]):
        assert lowering.find(name) is None


def test_a_decomposition_refuses_what_torchs_kernel_refuses(device: torch.device) -> None:
    x = torch.ones(3, dtype=torch.int64).to(device)
    for wrong, error in (
        (lambda: torch.logaddexp(x, x), NotImplementedError),
        (lambda: x.sinc_(), RuntimeError),
        (lambda: torch.sinc(x, out=torch.empty_like(x)), RuntimeError),
        (lambda: torch.ones(1).to(device).xlogy_(torch.ones(3).to(device)), RuntimeError),
    ):
        with pytest.raises(error):
            wrong()


def test_falling_back_is_counted_and_said_once(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_AMP_FALLBACK", "cpu")
    x = torch.ones(3).to(device)
    with warnings.catch_warnings(record=True) as caught, counted() as counts:
        warnings.simplefilter("always")
        y = torch.ops.lazy_failures.unknown_in_place(x)
        torch.ops.lazy_failures.unknown_in_place(x[1:])
    assert counts.fallbacks == 2
    messages = [str(w.message) for w in caught if "lazy_failures.unknown_in_place" in str(w.message)]
    assert len(messages) == 1
    assert "runs on the CPU (XLA_AMP_FALLBACK=cpu)" in messages[0]
    assert y is x
    assert x.tolist() == [2, 3, 3]
    monkeypatch.setenv("XLA_AMP_FALLBACK", "error")
    with pytest.raises(MissingLoweringError, match="unknown_in_place"):
        torch.ops.lazy_failures.unknown_in_place(x)


def test_on_the_cpu_an_operation_may_resize_and_a_number_is_a_tensor_again(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    LIBRARY.define("grow(Tensor(a!) x) -> Tensor(a!)")
    LIBRARY.impl("grow", lambda x: x.resize_(4).fill_(2), "CPU")
    monkeypatch.setenv("XLA_AMP_FALLBACK", "cpu")
    x, y = torch.ones(1).to(device), torch.tensor([0.5, 2.0]).to(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.ops.lazy_failures.grow(x)
        assert torch.special.chebyshev_polynomial_t(y, 3).tolist() == [-1, 26]  # 4 x^3 - 3 x
    assert x.tolist() == [2, 2, 2, 2]


# ---- at the flush ----------------------------------------------------------------------------------------------------


def test_a_failed_step_keeps_the_values_from_before_it(device: torch.device) -> None:
    parameter, state = torch.ones(3).to(device), torch.zeros(3, device=device)
    state.add_(1)
    engine.sync()
    before = array_behind(parameter), array_behind(state)
    parameter.sub_(0.5)
    state.mul_(sometimes(parameter))
    lost = state + 1
    named = r"lowering of lazy_failures.sometimes failed on \(float32\[3\]\): .* \(recorded at .*test_failures.py:\d+\)"
    with counted() as counts, pytest.raises(StepFailedError, match=named):
        engine.sync()
    assert (counts.executions, counts.compilations) == (0, 0)
    assert (array_behind(parameter), array_behind(state)) == before
    assert parameter.tolist() == state.tolist() == [1, 1, 1]
    with pytest.raises(StepFailedError, match=r"was to be computed by a step that failed: .*no such luck"):
        lost.tolist()
    with pytest.raises(StepFailedError, match="no such luck"):
        lost + 1
    with pytest.raises(StepFailedError, match="no such luck"):
        print(lost)
    lost.copy_(torch.full((3,), 4.0, device=device))  # a tensor that is overwritten is usable again
    assert lost.tolist() == [4, 4, 4]


def test_a_program_without_memory_keeps_the_values_from_before_it(device: torch.device) -> None:
    read = torch.arange(3.0).to(device)
    engine.sync()
    twice, large = read * 2, torch.zeros(10**13, device=device) + 1
    with pytest.raises(StepFailedError, match=r"(?i)out of memory"):
        engine.sync()
    assert read.tolist() == [0, 1, 2]
    for lost in (twice, large):
        with pytest.raises(StepFailedError, match=r"(?i)was to be computed by a step that failed: .*out of memory"):
            lost.sum().item()
    assert (read * 2).tolist() == [0, 2, 4]


def test_a_failure_names_the_line_of_its_own_call(device: torch.device) -> None:
    """The second call of a signature that has failed names its line, not that of the first."""
    for _ in range(2):
        x = torch.ones(3).to(device)
        engine.sync()
        line = sys._getframe().f_lineno + 1
        bad = torch.ops.lazy_failures.sometimes(x)
        with pytest.raises(StepFailedError, match=f"test_failures.py:{line}"):
            engine.sync()
        line = sys._getframe().f_lineno + 1
        bad = torch.ops.lazy_failures.sometimes(x)
        with pytest.raises(StepFailedError, match=f"test_failures.py:{line}"):
            bad.tolist()


def test_the_next_step_works(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(3).to(device)
    x.add_(sometimes(x))
    with pytest.raises(StepFailedError) as caught:
        x.sum().item()
    assert isinstance(caught.value.__cause__, ArithmeticError)
    monkeypatch.setitem(globals(), "broken", False)
    x.add_(sometimes(x))
    assert x.tolist() == [3, 3, 3]


def test_a_result_of_the_wrong_size_names_the_operation(device: torch.device) -> None:
    torch.ops.lazy_failures.wrong_size(torch.ones(3).to(device)).add_(1)
    kept = torch.ops.lazy_failures.wrong_size(torch.ones(3).to(device))
    with pytest.raises(StepFailedError, match=r"wrong_size failed.*gave shape \[2, 2\] where torch expects \[3\]"):
        engine.sync()
    del kept


def test_memory_that_was_given_away_says_so(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA took the donated arrays and then failed: those values are gone, and only those."""
    x, y = torch.ones(3).to(device), torch.ones(3).to(device)
    x.add_(y)

    def failing(program: Any, donated: list[Any], *_: Any) -> None:
        for array in donated:
            array.delete()
        raise RuntimeError("device lost")

    monkeypatch.setattr(execute, "dispatch", failing)
    with pytest.raises(StepFailedError, match="RuntimeError: device lost"):
        engine.sync()
    monkeypatch.undo()
    with pytest.raises(StepFailedError, match="memory was handed to a step that then failed: RuntimeError: device"):
        x.tolist()
    assert y.tolist() == [1, 1, 1]
    x.copy_(y)
    assert x.tolist() == [1, 1, 1]


def test_a_failed_step_gives_its_random_numbers_back(device: torch.device) -> None:
    torch.manual_seed(1)
    state, own = engine.get_rng_state(), torch.Generator(device=device).manual_seed(1)
    kept = sometimes(torch.randn(3, device=device) + torch.randn(3, device=device, generator=own))
    with pytest.raises(StepFailedError):
        engine.sync()
    assert torch.equal(engine.get_rng_state(), state)
    assert own.get_offset() == 0
    del kept


# ---- at the call, if steps are not recorded --------------------------------------------------------------------------

EAGER = """
    import json, sys, traceback
    import torch, xla_amp
    from xla_amp import lazy as engine, lowering
    from xla_amp.errors import StepFailedError

    device = xla_amp.xla_device()

    def losses(captured):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.LayerNorm(16),
                                    torch.nn.Linear(16, 3)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scaler = xla_amp.GradScaler(device, init_scale=1024.0)
        x, y = torch.randn(32, 8).to(device), torch.randint(0, 3, (32,)).to(device)

        def step(x, y):
            with xla_amp.autocast(device, dtype=torch.float16):
                loss = torch.nn.functional.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return loss

        run = xla_amp.compile(step) if captured else step
        return [run(x, y).item() for _ in range(6)], getattr(run, "replays", None), scaler.get_scale()

    library = torch.library.Library("eager_mode", "DEF")
    library.define("broken(Tensor x) -> Tensor")
    library.impl("broken", torch.empty_like, "Meta")

    @lowering.register("eager_mode::broken")
    def broken(x):
        raise ArithmeticError("no such luck")

    x = torch.ones(3).to(device)
    try:
        bad = torch.ops.eager_mode.broken(x + 1)
        failed = "later"
        engine.sync()
    except StepFailedError as error:
        failed = "at the call" if traceback.extract_tb(error.__traceback__)[0].lineno == LINE else "elsewhere"
        failed = failed if "bad" not in globals() else "later"
    print(json.dumps([losses(False), losses(True), failed, x.tolist(), engine.metrics()["executions"]]))
"""


def test_each_operation_runs_at_its_call_with_the_numbers_of_recorded_steps() -> None:
    """With ``XLA_AMP_EAGER=1``; it fails at its own line."""
    text = textwrap.dedent(EAGER)
    line = next(n for n, words in enumerate(text.splitlines(), 1) if "bad = torch" in words)
    found = []
    for eager in ("0", "1"):
        variables = {"JAX_PLATFORMS": "cpu", "XLA_AMP_EAGER": eager}
        out = forked.run(program=text.replace("LINE", str(line)), warnings="ignore", **variables)
        found.append(json.loads(out.stdout.splitlines()[-1]))
    recorded, eager = found
    for (expected, _, expected_scale), (losses, _, scale) in zip(recorded[:2], eager[:2], strict=True):
        assert losses == pytest.approx(expected, rel=1e-4)
        assert scale == expected_scale
    assert (eager[1][1], recorded[1][1] >= 1) == (0, True)  # captured steps run uncaptured
    assert (recorded[2:4], eager[2:4]) == (["later", [1, 1, 1]], ["at the call", [1, 1, 1]])
    assert eager[4] > 20 * recorded[4]  # executions: one for each operation


# ---- noticing others -------------------------------------------------------------------------------------------------


def _python(code: str) -> str:
    return forked.run(program=textwrap.dedent(code), warnings="ignore", JAX_PLATFORMS="cpu").stdout.strip()


def test_a_slot_that_another_backend_has_taken() -> None:
    out = _python("""
        import torch
        torch.utils.rename_privateuse1_backend("npu")
        import xla_amp
        from xla_amp.errors import DeviceError
        from xla_amp import lazy as engine
        for _ in range(2):
            try:
                engine.device()
            except DeviceError as error:
                print(error)
        assert not engine.is_started()
        with xla_amp.autocast("cpu", dtype=torch.bfloat16):
            print(torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype)
        assert torch.utils.rename_privateuse1_backend.__module__
    """)
    *errors, dtype = out.splitlines()
    assert len(errors) == 2
    assert all("backend 'npu' has taken it" in error and "cannot start the device 'jax'" in error for error in errors)
    assert dtype == "torch.bfloat16"


def test_a_platform_that_is_not_here() -> None:
    out = _python("""
        import os
        os.environ["XLA_AMP_PLATFORM"] = "tpu"
        from xla_amp import lazy as engine
        from xla_amp.errors import DeviceError
        try:
            engine.device()
        except DeviceError as error:
            print(error)
        import torch
        assert torch._C._get_privateuse1_backend_name() == "privateuseone"  # nothing was registered
        del os.environ["XLA_AMP_PLATFORM"]
        print(engine.device())
    """)
    error, device = out.splitlines()
    assert "JAX has no device of the platform tpu" in error
    assert device == "jax:0"
