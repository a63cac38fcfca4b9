"""Handlers of signals that raise: nothing aborts, nothing is torn, and users see the handlers that they set."""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import forked
import interrupt_fuzz
import pytest
import torch

import xla_amp
from xla_amp.common import interrupts
from xla_amp.lazy.graph.trace import trace
from xla_amp.lazy.programs import execute


class Interrupted(BaseException):
    """What the handler here raises."""


def interrupt(signum, frame):
    raise Interrupted(signum)


@pytest.fixture(autouse=True)
def _handler(device):
    before = signal.signal(signal.SIGUSR1, interrupt)
    yield
    signal.signal(signal.SIGUSR1, before)


def send() -> None:
    signal.raise_signal(signal.SIGUSR1)


def test_handlers_are_those_that_users_set():
    assert signal.getsignal(signal.SIGUSR1) is interrupt
    assert signal.signal(signal.SIGUSR1, signal.SIG_IGN) is interrupt
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    assert signal.signal(signal.SIGUSR1, signal.default_int_handler) is signal.SIG_IGN
    assert signal.signal(signal.SIGUSR1, signal.SIG_DFL) is signal.default_int_handler
    with pytest.raises(TypeError):
        signal.signal(signal.SIGUSR1, "no handler")
    with ThreadPoolExecutor(1) as pool, pytest.raises(ValueError, match="main thread"):
        pool.submit(signal.signal, signal.SIGUSR1, interrupt).result()


def test_a_signal_in_a_section_arrives_after_it(device):
    x = torch.ones(3, device=device)
    xla_amp.sync()
    recorded = []

    def section():
        with trace.lock:
            send()
            recorded.append("after the signal")
            with trace.lock:
                pass
            recorded.append("after the inner section")
        recorded.append("unreachable")

    with pytest.raises(Interrupted):
        section()
    assert recorded == ["after the signal", "after the inner section"]
    assert (x + 1).tolist() == [2.0] * 3


def test_a_handler_that_does_not_raise_runs_once(device):
    seen = []
    signal.signal(signal.SIGUSR1, lambda signum, frame: seen.append((signum, frame is not None)))
    with trace.lock:
        send()
        assert seen == []
    assert seen == [(signal.SIGUSR1, True)]
    send()
    assert len(seen) == 2


@pytest.mark.parametrize("in_native_code", [[], [True]], ids=["python", "a thread in native code"])
def test_sleeping_ends_at_once(device, in_native_code):
    start = time.perf_counter()
    threading.Timer(0.2, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)).start()
    answers = list(in_native_code)
    with interrupts.in_native_code.subscribed(lambda: bool(answers) and answers.pop()), pytest.raises(Interrupted):
        time.sleep(60)
    assert time.perf_counter() - start < 30


def model_and_optimizer(device, kind=torch.optim.AdamW):
    torch.manual_seed(3)
    layers = torch.nn.Linear(4, 4, bias=False), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)
    model = torch.nn.Sequential(*layers).to(device)
    return model, kind(model.parameters(), lr=0.1)


def state(model, optimizer):
    found = [value.cpu() for value in model.state_dict().values()]
    return found + [torch.as_tensor(v).cpu() for s in optimizer.state.values() for v in s.values()]


MOMENTS = ("forward", "read", "backward", "second backward", "step")


def interrupted_step(model, optimizer, x, moment):
    sending = [moment] if moment == "step" else []
    optimizer.register_step_pre_hook(lambda *_: send() if sending and sending.pop() else None)
    y = model(x).square().sum()
    if moment == "forward":
        send()
    if moment == "read":
        y.item()
        send()
    y.backward()
    if moment == "backward":
        send()
    if moment == "second backward":
        model(x).square().sum().backward()
        send()
    optimizer.step()


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("moment", MOMENTS)
def test_training_goes_on_after_an_interrupt_as_on_the_cpu(device, moment, first):
    found = []
    for where in (torch.device("cpu"), device):
        model, optimizer = model_and_optimizer(where)
        x = torch.arange(24.0).reshape(6, 4).sin().to(where)
        for step in range(3):
            if step == (0 if first else 1):
                before = [p.detach().clone() for p in model.parameters()]
                with pytest.raises(Interrupted):
                    interrupted_step(model, optimizer, x, moment)
                for old, now in zip(before, model.parameters(), strict=True):
                    assert torch.equal(old.cpu(), now.cpu())
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
        found.append(state(model, optimizer))
    for expected, value in zip(*found, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-3, atol=1e-4)


def test_a_signal_in_a_flush_arrives_when_it_is_done(device, monkeypatch):
    x = torch.ones(3, device=device)
    xla_amp.sync()
    original = execute.dispatch

    def dispatch(*args):
        outputs = original(*args)
        send()  # the program has taken the memory of x; its new value is not stored yet
        return outputs

    monkeypatch.setattr(execute, "dispatch", dispatch)
    x.add_(1)
    with pytest.raises(Interrupted):
        xla_amp.sync()
    monkeypatch.undo()
    assert x.tolist() == [2.0] * 3


def test_a_captured_step_is_done_or_not(device, monkeypatch):
    model, optimizer = model_and_optimizer(device, xla_amp.syncfree.AdamW)
    x = torch.ones(2, 4, device=device)
    when = []

    @xla_amp.compile
    def step(x):
        loss = model(x).sum()
        if when:
            send()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def done():
        return int(next(iter(optimizer.state.values()))["step"])

    step(x)
    when.append(True)
    with pytest.raises(Interrupted):
        step(x)
    assert done() == 2
    when.clear()
    for _ in range(4):
        step(x)
    assert step.replays
    original = execute.dispatch

    def dispatch(*args):
        send()
        return original(*args)

    monkeypatch.setattr(execute, "dispatch", dispatch)
    with pytest.raises(Interrupted):
        step(x)
    monkeypatch.undo()
    assert done() == 7


def test_a_scaler_selects_the_old_values_before_a_handler_runs(device):
    model, optimizer = model_and_optimizer(device)
    scaler = xla_amp.GradScaler(init_scale=4.0)
    optimizer.register_step_post_hook(lambda *_: send())
    before = [p.tolist() for p in model.parameters()]
    scaler.scale(model(torch.full((2, 4), torch.inf, device=device)).sum()).backward()
    with pytest.raises(Interrupted):
        scaler.step(optimizer)
    assert [p.tolist() for p in model.parameters()] == before


PROGRAM = """
import asyncio, os, signal, threading, time
import torch, xla_amp

signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background ignores

class Stop(Exception): pass
def stop(*a): raise Stop
def ones(): return torch.ones(4, 4, device=xla_amp.xla_device(), requires_grad=True)
def work(x):
    end = time.time() + 60
    while time.time() < end:
        (x * 2).sum().backward()
"""
CASES = {
    "Ctrl-C": """
x = ones()
threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try: work(x)
except KeyboardInterrupt: print("stopped")
""",
    "started on another thread": """
signal.signal(signal.SIGALRM, stop)
t = threading.Thread(target=xla_amp.xla_device); t.start(); t.join()
assert signal.getsignal(signal.SIGALRM) is stop
x = ones()
signal.setitimer(signal.ITIMER_REAL, 0.3)
try: work(x)
except Stop: print("stopped")
""",
    "asyncio": """
async def main(x):
    loop, calls = asyncio.get_running_loop(), []
    loop.add_signal_handler(signal.SIGTERM, lambda: calls.append(1))
    for _ in range(20):
        os.kill(os.getpid(), signal.SIGTERM); (x * 2).sum().backward(); await asyncio.sleep(0.01)
    assert len(calls) == 20, len(calls)
    print("stopped")
asyncio.run(main(ones()))
""",
}


# Python prints and drops what a signal raises while an object is freed, on every device.
@pytest.mark.full
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("phase", ["stock AdamW", "eager loop", "threads"])
def test_interrupts_at_random_moments(device, phase):
    before = {signum: signal.getsignal(signum) for signum in interrupt_fuzz.SIGNALS}
    try:
        result = interrupt_fuzz.run(phase, 40, seed=1)
    finally:
        for signum, old in before.items():
            signal.signal(signum, old)
    assert result["interrupts"] >= 40
    assert (result["wrong"], result["errors"]) == (0, {})


@pytest.mark.parametrize("case", CASES)
def test_in_a_program(case):
    assert "stopped" in forked.run(program=PROGRAM + CASES[case], whole_end=True, JAX_PLATFORMS="cpu").stdout
