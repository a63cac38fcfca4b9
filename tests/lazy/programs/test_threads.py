"""Several Python threads that record, flush, read and upload at once: right values, no lost or doubled work."""

from __future__ import annotations

import contextlib
import copy
import queue
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from harness import array_behind
from torch import nn

import xla_amp
from xla_amp import lazy as engine
from xla_amp.lazy.graph import trace
from xla_amp.lazy.programs import execute


@pytest.fixture(autouse=True)
def _switch_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def together(*functions: Callable[[], None]) -> None:
    """Runs the functions in threads of their own; raises the first error of any."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(functions))

    def run(function: Callable[[], None]) -> None:
        try:
            start.wait()
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(f,)) for f in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a thread is stuck"
    if errors:
        raise errors[0]


def test_each_thread_cuts_while_others_record(device: torch.device) -> None:
    total = torch.zeros(3, device=device)

    def work() -> None:
        own = torch.zeros(5, device=device)
        for i in range(100):
            total.add_(1)
            own.add_(1)
            own[1:3].sub_(1)
            if i % 10 == 0:
                engine.sync()
        assert own.tolist() == [100, 0, 0, 100, 100]

    together(*[work] * 4)
    assert total.tolist() == [400] * 3


def test_threads_that_train(device: torch.device) -> None:
    def train(seed: int) -> list[float]:
        generator = torch.Generator().manual_seed(seed)
        weight = nn.Parameter(torch.randn(3, 2, generator=generator).to(device))
        x = torch.randn(4, 3, generator=generator).to(device)
        optimizer = torch.optim.Adam([weight], lr=0.1)
        losses = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = (x @ weight).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    alone = [train(seed) for seed in range(3)]
    side_by_side: dict[int, list[float]] = {}
    together(*[lambda s=s: side_by_side.__setitem__(s, train(s)) for s in range(3)])
    for seed in range(3):
        assert side_by_side[seed] == pytest.approx(alone[seed], rel=1e-6)


def test_uploads_of_new_shapes_beside_new_operations(device: torch.device) -> None:
    """Both give identities to specs and instructions; two of one identity would mix programs up."""

    def load(rank: int) -> None:
        for i in range(1, 60):
            x = engine.to_device(torch.full((i,) + (1,) * rank, float(i)))
            assert x.shape[0] == i

    def compute() -> None:
        for i in range(1, 60):
            x = torch.full((1, 1, 1, 1, i), 2.0, device=device)
            y = x.view(-1) * 3
            if i % 20 == 0:
                assert y.tolist() == [6.0] * i

    together(*[lambda r=r: load(r) for r in range(5, 8)], compute)
    assert [instruction.id for instruction in trace.instructions.values()] == list(trace.instructions)


def _slow(device: torch.device) -> torch.Tensor:
    x = torch.ones(600, 600, device=device)
    for _ in range(60):
        x = (x @ x).tanh()
    engine.sync()
    return x


def test_waiting_does_not_hold_the_tape(device: torch.device) -> None:
    """While one thread waits for a slow program, another one records."""
    _slow(device).sum().item()
    x = _slow(device)
    waiting = threading.Thread(target=engine.sync, kwargs={"wait": True})
    waiting.start()
    y = torch.ones(3, device=device) + 1
    assert not array_behind(x).is_ready()
    waiting.join()
    assert array_behind(x).is_ready()
    assert y.tolist() == [2, 2, 2]


# ---- a trace belongs to a thread ------------------------------------------------------------------------------------


_OF_THE_CPU = threading.Lock()
"""Around seeding and drawing from torch's CPU generator, which all threads share."""


def _net(seed: int, device: torch.device, width: int = 16, dropout: float = 0.0) -> nn.Module:
    with _OF_THE_CPU, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width), nn.Dropout(dropout), nn.Linear(width, 4)
    return nn.Sequential(*layers).to(device)


def _batches(seed: int, count: int, width: int = 16) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(8, width, generator=generator), torch.randint(4, (8,), generator=generator)) for _ in range(count)
    ]


def _train(
    device: torch.device,
    seed: int,
    *,
    captured: bool,
    scaled: bool,
    steps: int = 8,
    recorded: int = 3,
    model: nn.Module | None = None,
) -> list[torch.Tensor]:
    """The parameters and the last loss after some steps of a model, by default of one's own.

    To make a model draws on the host, beside which no call of another thread is captured.  All steps but the
    `recorded` first must be replayed.
    """
    model = model or _net(seed, device)
    optimizer = xla_amp.syncfree.AdamW(model.parameters(), lr=1e-2)
    scaler = xla_amp.GradScaler(device.type, enabled=scaled)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with xla_amp.autocast(device, dtype=torch.float16 if scaled else torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    run = xla_amp.compile(step) if captured else step
    for x, y in _batches(seed, steps):
        loss = run(x.to(device), y.to(device))
    if captured:
        assert run.replays >= steps - recorded, (run.reasons, run._own.refusals)
    return [*(parameter.detach().cpu() for parameter in model.parameters()), loss.detach().cpu()]


def _same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _side_by_side(function: Callable[[int], Any], count: int) -> list[Any]:
    """What the function returns for 0, 1, ... in as many threads."""
    found: dict[int, Any] = {}
    together(*[lambda k=k: found.__setitem__(k, function(k)) for k in range(count)])
    return [found[k] for k in range(count)]


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
@pytest.mark.parametrize("captured", [False, True], ids=["recorded", "captured"])
def test_threads_that_train_have_the_bits_and_the_programs_of_one(
    device: torch.device, captured: bool, scaled: bool, count: int
) -> None:
    execute.clear_programs()
    with xla_amp.testing.counts() as alone:
        expected = [_train(device, seed, captured=captured, scaled=scaled) for seed in range(count)]
        engine.sync()
    execute.clear_programs()
    models = [_net(seed, device) if captured else None for seed in range(count)]
    with xla_amp.testing.counts() as seen:
        # What another thread does may once refuse a call, which then takes two more (docs/compile.md).
        found = _side_by_side(
            lambda seed: _train(device, seed, captured=captured, scaled=scaled, recorded=5, model=models[seed]), count
        )
    assert all(map(_same, found, expected))
    assert seen.compilations <= alone.compilations, (seen, alone)


@pytest.mark.parametrize("captured", [False, True], ids=["recorded", "captured"])
def test_threads_that_ask_one_model(device: torch.device, captured: bool) -> None:
    model = _net(0, device).eval()
    ask = torch.no_grad()(model)
    ask = xla_amp.compile(ask, state=[model]) if captured else ask

    def work(seed: int) -> list[torch.Tensor]:
        return [ask(x.to(device)).cpu() for x, _ in _batches(seed, 12)]

    execute.clear_programs()
    with xla_amp.testing.counts() as alone:
        expected = list(map(work, range(4)))
    execute.clear_programs()
    with xla_amp.testing.counts() as seen:
        found = _side_by_side(work, 4)
    assert all(map(_same, found, expected))
    assert seen.compilations <= alone.compilations
    assert not captured or ask.replays >= 80


def test_a_trainer_beside_a_thread_that_evaluates_a_copy(device: torch.device) -> None:
    def evaluate(_: object = None) -> list[torch.Tensor]:
        copied = copy.deepcopy(_net(9, device)).eval()
        with torch.no_grad():
            return [copied(x.to(device)).argmax(-1).cpu() for x, _ in _batches(5, 15)]

    execute.clear_programs()
    with xla_amp.testing.counts() as alone:
        trained, evaluated = _train(device, 3, captured=False, scaled=True), evaluate()
    execute.clear_programs()
    works = {0: lambda: _train(device, 3, captured=False, scaled=True), 1: evaluate}
    with xla_amp.testing.counts() as seen:
        found = _side_by_side(lambda k: works[k](), 2)
    assert _same(found[0], trained)
    assert _same(found[1], evaluated)
    assert seen.compilations <= alone.compilations


def in_thread(function: Callable[[], Any]) -> Any:
    """What a function returns in another thread, which has ended."""
    found: list[Any] = []
    together(lambda: found.append(function()))
    return found[0]


def test_what_a_thread_left_unfinished_is_finished_by_who_reads_it(device: torch.device) -> None:
    weight = torch.ones(3, device=device)
    engine.sync()

    def work() -> torch.Tensor:
        weight.mul_(2)
        return weight + 1

    mine = torch.full((3,), 5.0, device=device) * 2
    with xla_amp.testing.counts() as seen:
        result = in_thread(work)
        assert seen.executions == 0
        assert (result + mine).tolist() == [13] * 3  # the thread's trace and this one's
    assert seen.executions == 2
    assert weight.tolist() == [2] * 3


def test_each_thread_ends_its_own_step_only(device: torch.device) -> None:
    mine = torch.ones(3, device=device) + 1
    with xla_amp.testing.counts() as seen:
        assert in_thread(lambda: (torch.ones(2, device=device) * 3).tolist()) == [3, 3]
        in_thread(lambda: engine.sync(wait=True))
    assert seen.executions == 1
    assert array_behind(mine) is None
    engine.sync()
    assert array_behind(mine) is not None


@pytest.mark.parametrize("change", ["write", "upload", "optimizer", "replay"])
def test_a_value_that_another_thread_has_read_stays(device: torch.device, change: str) -> None:
    """Neither a write nor a donation reaches what another thread has recorded before."""
    parameter = nn.Parameter(torch.ones(4, device=device))
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        parameter.sum().backward()
        optimizer.step()

    replayed = xla_amp.compile(step)
    for _ in range(4):
        replayed()
    now = parameter.tolist()
    before = parameter.detach() * 2
    again = parameter.detach() + 0

    def work() -> None:
        if change in ("write", "upload"):
            with torch.no_grad():
                parameter.add_(1) if change == "write" else parameter.copy_(torch.zeros(4))
        else:
            (step if change == "optimizer" else replayed)()
        engine.sync(wait=True)

    in_thread(lambda: [work() for _ in range(6)])
    assert change != "replay" or replayed.replays >= 3
    assert before.tolist() == [2 * x for x in now]
    assert again.tolist() == now
    assert parameter.tolist() != now


def test_both_threads_read_and_write(device: torch.device) -> None:
    """Read here, read there, written there, read here: each read is of the value at its time."""
    x = torch.ones(2, device=device)
    engine.sync()
    first = x + 0
    turns = [threading.Event() for _ in range(3)]
    found: dict[str, torch.Tensor] = {}

    def other() -> None:
        found["before"] = x * 10
        turns[0].set()
        turns[1].wait(20)
        found["after"] = x * 10
        x.add_(5)
        turns[2].set()

    thread = threading.Thread(target=other)
    thread.start()
    turns[0].wait(20)
    second = x + 0
    x.add_(1)
    third = x + 0
    turns[1].set()
    turns[2].wait(20)
    fourth = x + 0
    thread.join(20)
    values = [each[0].item() for each in (first, second, third, fourth, found["before"], found["after"], x)]
    assert values == [1, 1, 2, 7, 10, 20, 7]


def test_batches_that_a_thread_computes(device: torch.device) -> None:
    """A queue of tensors that one thread computes, another one trains on, and a third one logs."""
    batches, losses = queue.Queue(2), queue.Queue()
    weight = nn.Parameter(torch.ones(3, device=device))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    logged: list[float] = []

    def load() -> None:
        for i in range(20):
            x = torch.full((2, 3), float(i % 3)).to(device)
            batches.put((x + 1) * 0.5)
        batches.put(None)

    def train() -> None:
        while (batch := batches.get()) is not None:
            optimizer.zero_grad()
            loss = (batch @ weight - 1).square().mean()
            loss.backward()
            optimizer.step()
            losses.put(loss.detach())
        losses.put(None)

    def log() -> None:
        while (loss := losses.get()) is not None:
            logged.append(loss.item())

    together(load, train, log)
    w, expected = np.ones(3), []
    for i in range(20):
        x = np.full((2, 3), (i % 3 + 1) * 0.5)
        error = x @ w - 1
        expected.append(np.mean(error**2))
        w = w - 0.1 * x.T @ error
    np.testing.assert_allclose(logged, expected, rtol=2e-4, atol=1e-9)


def test_backward_in_another_thread(device: torch.device) -> None:
    """What autograd's thread records belongs to the thread that calls `backward`."""
    x = torch.full((3,), 2.0, device=device, requires_grad=True)
    loss = (x * x).sum()
    engine.sync()
    mine = torch.ones(3, device=device) * 7  # unfinished, here

    def work() -> None:
        loss.backward()
        engine.sync()

    with xla_amp.testing.counts() as seen:
        in_thread(work)
    assert seen.executions == 1
    assert array_behind(x.grad) is not None
    assert array_behind(mine) is None
    assert x.grad.tolist() == [4] * 3


def test_random_numbers_of_a_thread_are_its_own(device: torch.device) -> None:
    # A checkpoint's second run sets the CPU's generator, which all threads share: no model is made beside it.
    models = [_net(1, device, dropout=0.5) for _ in range(3)]

    def draw(seed: int) -> list[torch.Tensor]:
        model = models[seed]
        with _OF_THE_CPU:
            torch.manual_seed(seed)
        found = []
        for x, _ in _batches(0, 4):
            x = x.to(device).requires_grad_()
            y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
            torch.autograd.backward(y.sum(), inputs=[x])
            found += [y.detach().cpu(), x.grad.cpu()]
        return [*found, torch.rand(5, device=device).cpu()]

    expected = [draw(seed) for seed in range(3)]
    found = _side_by_side(draw, 3)
    assert all(map(_same, found, expected))
    one, other = _side_by_side(lambda _: torch.rand(100, device=device).cpu(), 2)
    assert not one.eq(other).any()


def test_a_generator_of_several_threads_repeats_nothing(device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(3)
    mine = [torch.rand(50, device=device, generator=generator)]
    theirs = in_thread(lambda: torch.rand(50, device=device, generator=generator))
    mine.append(torch.rand(50, device=device, generator=generator))
    assert len({x for each in (*mine, theirs) for x in each.tolist()}) == 150
    assert generator.get_offset() == 3


def test_a_capture_beside_a_thread_that_reads(device: torch.device) -> None:
    """Reads, models and optimizers of other threads are nothing that a step does."""
    stop, models = threading.Event(), [_net(seed, device) for seed in (2, 7)]

    def other() -> None:
        while not stop.is_set():
            _train(device, 7, captured=False, scaled=False, steps=1, model=models[1])

    def train() -> None:
        try:
            assert _same(_train(device, 2, captured=True, scaled=True, model=models[0]), expected)
        finally:
            stop.set()

    expected = _train(device, 2, captured=True, scaled=True)
    together(train, other)


def test_a_capture_beside_a_thread_that_captures(device: torch.device) -> None:
    """That one collects garbage and looks for schedules while this one records: values live as long as without it."""
    seeds, models = iter(range(20)), [_net(seed, device) for seed in range(20)]
    weight = nn.Parameter(torch.ones(3, device=device))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def beside() -> None:
        if len(losses) % 2:
            in_thread(lambda: _train(device, 0, captured=True, scaled=False, steps=4, model=models[next(seeds)]))

    def step(x: torch.Tensor) -> torch.Tensor:
        cycle: list[Any] = [x * 2]
        cycle.append(cycle)
        beside()
        del cycle
        optimizer.zero_grad()
        loss = (weight * x).sum()
        loss.backward()
        optimizer.step()
        return loss

    run, losses = xla_amp.compile(step, strict=True), []
    for _ in range(6):
        losses.append(run(torch.ones(3, device=device)).item())
    assert run.replays == 3
    np.testing.assert_allclose(losses, [3 - 0.3 * step for step in range(6)], rtol=1e-6)


def test_an_interrupt_while_another_thread_records(device: torch.device) -> None:
    """A handler that raises in the main thread leaves no lock held, and both threads' values right."""
    stop, rounds = threading.Event(), []

    def other() -> None:
        total = torch.zeros(2, device=device)
        while not stop.is_set():
            total = total + 1
            rounds.append(1)
            if len(rounds) % 5 == 0:
                assert total.tolist() == [len(rounds)] * 2

    def handler(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, handler)
    thread = threading.Thread(target=other)
    thread.start()
    mine = torch.zeros(2, device=device)
    try:
        for _ in range(20):
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            with contextlib.suppress(KeyboardInterrupt):
                while True:
                    mine + 1
    finally:
        signal.signal(signal.SIGALRM, before)
        stop.set()
        thread.join(60)
    assert not thread.is_alive()
    assert rounds
    assert (mine + 1).tolist() == [1, 1]


def test_a_thread_that_ends_while_another_ones_values_are_computed(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a thread makes all others ask whose trace is in the place: it stays the one that runs."""
    handed: queue.Queue[torch.Tensor] = queue.Queue()
    own = torch.ones(3, device=device) * 2
    thread = threading.Thread(target=lambda: handed.put(torch.ones(3, device=device) * 5))
    thread.start()
    thread.join()
    reads = execute._recorded

    def ends() -> execute.Run:
        other = threading.Thread(target=trace.this_thread)
        other.start()
        other.join()
        return reads()

    monkeypatch.setattr(execute, "_recorded", ends)
    assert (handed.get() + own).tolist() == [7, 7, 7]
    assert own.tolist() == [2, 2, 2]


@pytest.mark.full
@pytest.mark.parametrize("seed", range(200))
def test_random_interleavings(device: torch.device, seed: int) -> None:
    """Threads with private models, a shared read-only one, a shared counter and handed tensors never wait for ever."""
    chance = random.Random(seed)
    shared = _net(0, device).eval()
    count = chance.choice([2, 3, 4])
    plans = [[chance.choice("trainhandbackreadsyncdrop") for _ in range(12)] for _ in range(count)]
    inboxes = [queue.Queue() for _ in range(count)]
    total = torch.zeros(2, device=device)
    expected = sum(letter in "ae" for plan in plans for letter in plan)

    def work(k: int) -> None:
        own, values, host = torch.zeros(3, device=device), [], np.zeros(3)
        parameter = nn.Parameter(torch.ones(3, device=device))
        optimizer = torch.optim.SGD([parameter], lr=0.25)
        weight = np.ones(3)
        for letter in plans[k]:
            if letter in "tr":
                optimizer.zero_grad()
                (parameter * 2 + own).sum().backward()
                optimizer.step()
                weight -= 0.5
            elif letter in "ae":
                total.add_(1)
            elif letter in "hn":
                inboxes[(k + 1) % count].put((own * 2, host * 2))
            elif letter in "bd":
                with contextlib.suppress(queue.Empty):
                    values.append(inboxes[k].get_nowait())
                    values.append((values[-1][0] + own, values[-1][1] + host))
            elif letter in "ck":
                with torch.no_grad():
                    shared(torch.ones(2, 16, device=device)).argmax(-1).tolist()
            elif letter in "sy":
                engine.sync(wait=letter == "y")
            else:
                own = own + 1
                own[:2].mul_(2)
                host = (host + 1) * [2, 2, 1]
        for value, right in (*values, (own, host), (parameter.detach(), weight)):
            np.testing.assert_allclose(value.cpu(), right)

    together(*[lambda k=k: work(k) for k in range(count)])
    assert total.tolist() == [expected] * 2
