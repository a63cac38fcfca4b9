"""Handlers of signals that raise: nothing aborts, nothing is torn, and users see the handlers that they set."""

from __future__ import annotations

import signal
import sys
import textwrap
import threading
import time
import weakref

import forked
import interrupt_fuzz
import pytest
import torch

import xla_amp
from xla_amp import config, interrupts
from xla_amp.lazy.graph.trace import trace
from xla_amp.lazy.programs import execute
from xla_amp.lazy.steps import undo


class Interrupted(BaseException):
    """What the handler here raises."""


def interrupt(signum, frame):
    raise Interrupted(signum)


@pytest.fixture(scope="module")
def device() -> torch.device:
    return xla_amp.xla_device()


@pytest.fixture(autouse=True)
def _handler(device):
    before = signal.signal(signal.SIGUSR1, interrupt)
    yield
    signal.signal(signal.SIGUSR1, before)


def send() -> None:
    signal.raise_signal(signal.SIGUSR1)


def test_handlers_are_those_that_users_set():
    before = signal.signal(signal.SIGUSR2, interrupt)
    try:
        assert signal.getsignal(signal.SIGUSR2) is interrupt
        assert signal.signal(signal.SIGUSR2, signal.SIG_IGN) is interrupt
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
        assert signal.signal(signal.SIGUSR2, signal.default_int_handler) is signal.SIG_IGN
        assert signal.signal(signal.SIGUSR2, signal.SIG_DFL) is signal.default_int_handler
        with pytest.raises(TypeError):
            signal.signal(signal.SIGUSR2, "no handler")
        with pytest.raises(ValueError, match="main thread"):
            _in_thread(lambda: signal.signal(signal.SIGUSR2, interrupt))
    finally:
        signal.signal(signal.SIGUSR2, before)


def _in_thread(function):
    errors = []

    def run():
        try:
            function()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


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
    before = signal.signal(signal.SIGUSR1, lambda signum, frame: seen.append((signum, frame is not None)))
    try:
        with trace.lock:
            send()
            assert seen == []
        assert seen == [(signal.SIGUSR1, True)]
        send()
        assert len(seen) == 2
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_sleeping_ends_at_once(device):
    start = time.perf_counter()
    threading.Timer(0.2, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)).start()
    with pytest.raises(Interrupted):
        time.sleep(60)
    assert time.perf_counter() - start < 30


def test_context_managers_are_never_half_entered(device):
    for _ in range(2):
        with pytest.raises(Interrupted), xla_amp.autocast(device):
            send()
        assert not torch.is_autocast_enabled("jax")
    code = xla_amp.autocast.__exit__.__code__
    assert code in interrupts._short
    assert torch.no_grad.__exit__.__code__ in interrupts._short


class Sends:
    def __del__(self):
        send()


class Plain:
    """Weak references to its instances can have callbacks."""


@pytest.mark.parametrize("finalizer", ["__del__", "weakref.finalize", "weakref.ref"])
def test_finalizers_lose_no_exception(device, finalizer):
    def drop():
        dropped = Sends() if finalizer == "__del__" else Plain()
        weakref.finalize(dropped, send if finalizer == "weakref.finalize" else str)
        held = weakref.ref(dropped, lambda _: send() if finalizer == "weakref.ref" else None)
        del dropped
        for _ in range(2):  # Python looks for signals when it jumps backward
            pass
        return held

    with pytest.raises(Interrupted):
        drop()
    assert not interrupts._dropped


def test_other_exceptions_of_finalizers_are_printed(device, monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", interrupts._keep_dropped(seen.append))

    class Raises:
        def __del__(self):
            raise ValueError("of the user")

    Raises()
    assert [str(each.exc_value) for each in seen] == ["of the user"]


def model_and_optimizer(device, kind=torch.optim.AdamW):
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5)).to(device)
    return model, kind(model.parameters(), lr=0.1)


def state(model, optimizer):
    found = [value.tolist() for value in model.state_dict().values()]
    found += [torch.as_tensor(v).tolist() for s in optimizer.state.values() for v in s.values()]
    return [*found, torch.jax.get_rng_state().tolist(), [p.grad is None for p in model.parameters()]]


MOMENTS = ("forward", "read", "backward", "second backward", "step")


def interrupted_step(model, optimizer, x, moment):
    sending = [moment] if moment == "step" else []
    optimizer.register_step_pre_hook(lambda *_: send() if sending and sending.pop() else None)
    y = model(x).sum()
    if moment == "forward":
        send()
    if moment == "read":
        y.item()
        send()
    y.backward()
    if moment == "backward":
        send()
    if moment == "second backward":
        model(x).sum().backward()
        send()
    optimizer.step()
    for _ in range(2):  # Python looks for signals when it jumps backward
        pass


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("moment", MOMENTS)
def test_an_interrupted_step_is_undone(device, moment, first):
    expected = []
    for interrupted in (False, True):
        model, optimizer = model_and_optimizer(device)
        xla_amp.sync()
        x = torch.arange(8.0).reshape(2, 4).to(device)
        for step in range(3):
            if interrupted and step == (0 if first else 1):
                with pytest.raises(Interrupted) as caught:
                    interrupted_step(model, optimizer, x, moment)
                if moment == "step":  # an optimizer's step runs as a whole
                    optimizer.zero_grad()
                    continue
                assert "undone" in caught.value.__notes__[0]
            # the gradients are those of this step alone, although nothing dropped the interrupted one's
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        expected.append(state(model, optimizer))
    assert expected[0] == expected[1]


def test_what_is_older_than_the_step_stays(device):
    model, _ = model_and_optimizer(device)
    before = torch.ones(3, device=device) * 4  # not computed yet
    counter = torch.zeros(3, device=device)
    counter += 1
    losses = []

    def forward():
        losses.append(model(torch.ones(2, 4, device=device)).sum())
        counter.add_(1)
        send()

    with pytest.raises(Interrupted):
        forward()
    assert before.tolist() == [4.0] * 3
    assert counter.tolist() == [1.0] * 3
    with pytest.raises(xla_amp.errors.StepFailedError, match="interrupted"):
        losses[0].item()


def test_outside_of_a_training_step_nothing_is_undone(device):
    model, _ = model_and_optimizer(device)
    model.eval()
    total = torch.zeros((), device=device)

    @torch.no_grad()
    def evaluate():
        for _ in range(3):
            total.add_(model(torch.ones(2, 4, device=device)).sum() * 0 + 1)
        send()

    with pytest.raises(Interrupted):
        evaluate()
    assert total.item() == 3
    assert undo._step is None


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


def test_an_interrupt_between_step_and_update_ends_the_iteration(device):
    model, optimizer = model_and_optimizer(device, xla_amp.syncfree.AdamW)
    scaler = xla_amp.GradScaler(init_scale=4.0, growth_interval=1)
    x = torch.ones(2, 4, device=device)

    def interrupted_after(method):
        scaler.scale(model(x).sum()).backward()
        method(optimizer)
        send()

    with pytest.raises(Interrupted):
        interrupted_after(scaler.step)
    optimizer.zero_grad()
    assert scaler.get_scale() == 8.0
    with pytest.raises(Interrupted):
        interrupted_after(scaler.unscale_)
    scaler.scale(model(x).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 16.0


PROGRAM = """
    import asyncio, os, signal, threading, time
    import torch, xla_amp

    class Stop(Exception): pass
    def stop(*a): raise Stop
    {before}
    {start}
    x = torch.ones(4, 4, device=xla_amp.xla_device(), requires_grad=True)
    def work():
        end = time.time() + 60
        while time.time() < end:
            (x * 2).sum().backward()
    {after}
"""
CASES = {
    "set before the start": (
        "signal.signal(signal.SIGALRM, stop)",
        "",
        "signal.setitimer(signal.ITIMER_REAL, 0.3)\n    try: work()\n    except Stop: print('stopped')",
    ),
    "Ctrl-C": (
        "",
        "",
        "threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()\n"
        "    try: work()\n    except KeyboardInterrupt: print('stopped')",
    ),
    "started on another thread": (
        "signal.signal(signal.SIGALRM, stop)",
        "t = threading.Thread(target=xla_amp.xla_device); t.start(); t.join()",
        "assert signal.getsignal(signal.SIGALRM) is stop\n    signal.setitimer(signal.ITIMER_REAL, 0.3)\n"
        "    try: work()\n    except Stop: print('stopped')",
    ),
    "asyncio": (
        "",
        "",
        "async def main():\n"
        "        loop, calls = asyncio.get_running_loop(), []\n"
        "        loop.add_signal_handler(signal.SIGTERM, lambda: calls.append(1))\n"
        "        for _ in range(20):\n"
        "            os.kill(os.getpid(), signal.SIGTERM); (x * 2).sum().backward(); await asyncio.sleep(0.01)\n"
        "        assert len(calls) == 20, len(calls)\n"
        "        print('stopped')\n"
        "    asyncio.run(main())",
    ),
}


# Python prints and drops what a signal raises while an object is freed.
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
    before, start, after = CASES[case]
    program = textwrap.dedent(PROGRAM).format(
        before=before, start=start, after=textwrap.dedent(after.replace("\n    ", "\n"))
    )
    environment = config.child_environment({"JAX_PLATFORMS": "cpu"})
    # Python leaves Ctrl-C ignored if it was at the start, as it is for a job in the background.
    program = f"import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n{program}"
    run = forked.run(program=program, environment=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "stopped" in run.stdout
