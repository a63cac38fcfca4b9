"""Interrupt training at random moments: nothing aborts, values of no operation are lost, and training goes on.

Each phase trains a small model on the lazy device.  A signal whose handler raises arrives after a random time; then
training goes on as it must on every device, with gradients dropped and the scaler updated.  At the end all values are
finite, and tensors that no step writes are as they were.

    python tests/helpers/interrupt_fuzz.py [--interrupts 20000] [--seed 0] [--phase NAME]
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from open_regions import close_regions

import xla_amp

BATCHES = 10
SIGNALS = {signal.SIGALRM: signal.ITIMER_REAL, signal.SIGVTALRM: signal.ITIMER_VIRTUAL}


class Interrupted(Exception):
    """Raised by the signals' handler."""


def handler(signum: int, frame: Any) -> None:
    """The handler of every signal here."""
    raise Interrupted(signum)


def correct_answers(model: torch.nn.Module, batches: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> int:
    """How often a classifier is right, in evaluation mode and without gradients; added up on the batches' device."""
    model.eval()
    try:
        with torch.no_grad():
            correct: Any = 0
            for x, y in batches:
                correct += (model(x).argmax(-1) == y).sum()
        return int(correct)
    finally:
        model.train()


class Training:
    """A model with batch norm and dropout, its optimizer, and a count of its steps on the device."""

    def __init__(self, phase: str) -> None:
        torch.manual_seed(7)
        self.phase = phase
        self.device = device = xla_amp.xla_device()
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 4)
        ).to(device)
        stock = phase in ("stock AdamW", "eager loop")
        kind = torch.optim.AdamW if stock else xla_amp.syncfree.AdamW
        self.optimizer = kind(self.model.parameters(), lr=1e-2)
        self.scaler = xla_amp.GradScaler(init_scale=2.0**10, growth_interval=5, enabled=phase in ("amp", "compiled"))
        self.batches = [(torch.randn(6, 8).to(device), torch.randint(4, (6,)).to(device)) for _ in range(BATCHES)]
        self.given = [(x.cpu(), y.cpu()) for x, y in self.batches]
        self.held = [(x.to(device), y.to(device)) for x, y in self.given[:3]]
        self.call: Callable[..., Any] = self.step
        if phase == "compiled":
            self.call = xla_amp.compile(self.step)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """One training step."""
        self.optimizer.zero_grad()
        with xla_amp.autocast(self.device, dtype=torch.bfloat16, enabled=self.phase in ("amp", "compiled")):
            loss = torch.nn.functional.cross_entropy(self.model(x).float(), y)
        self.scaler.scale(loss).backward()
        if self.phase == "amp":
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if self.phase == "eager loop":
            loss.item()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def done(self) -> int:
        """Steps done so far, as the optimizer counts them."""
        counts = [state["step"] for state in self.optimizer.state.values() if "step" in state]
        return int(counts[0]) if counts else 0

    def evaluate(self) -> int:
        """Correct answers on the held-out batches."""
        return correct_answers(self.model, self.held)

    def go_on(self) -> None:
        """After an interrupt: what it may leave half done on every device."""
        torch.set_grad_enabled(True)
        close_regions()
        self.model.train()
        self.optimizer.zero_grad()
        if self.scaler.is_enabled():
            with contextlib.suppress(AssertionError):  # no iteration had begun
                self.scaler.update()

    def lost(self) -> list[str]:
        """Names of values that are not finite, and of batches that have changed."""
        found = [name for name, value in self.values().items() if not value.double().isfinite().all()]
        given = zip(self.given, self.batches, strict=True)
        return found + [f"batch {n}" for n, (a, b) in enumerate(given) if not all(map(_same, a, b))]

    def values(self) -> dict[str, torch.Tensor]:
        """Everything that training changes."""
        found = {name: value.cpu() for name, value in self.model.state_dict().items()}
        for index, state in self.optimizer.state_dict()["state"].items():
            found |= {f"{index}.{name}": torch.as_tensor(value).cpu() for name, value in state.items()}
        found["random"] = torch.get_device_module(self.device).get_rng_state()
        if self.scaler.is_enabled():
            found["scale"] = torch.tensor(self.scaler.get_scale())
        found["gradients"] = torch.tensor([p.grad is None for p in self.model.parameters()])
        return found


def _same(expected: torch.Tensor, value: torch.Tensor) -> bool:
    return torch.equal(expected, value.cpu())


def settle() -> None:
    """Lets an interrupt arrive that waits until code of torch has ended."""
    with contextlib.suppress(Interrupted):
        time.sleep(0.05)
    close_regions()


def train(phase: str, interrupts: int, seed: int) -> tuple[int, int, collections.Counter[str], float]:
    """Trains again and again until `interrupts` have arrived; returns their number, wrong runs, errors and seconds."""
    chance = random.Random(f"{phase} {seed}")
    arrived = wrong = 0
    errors: collections.Counter[str] = collections.Counter()
    start = time.perf_counter()
    while arrived < interrupts:
        training = Training(phase)
        training.call(*training.batches[0])  # torch's optimizers make their state parameter by parameter
        evaluated = False
        while True:
            timer = chance.choice(list(SIGNALS.values()))
            try:
                try:
                    signal.setitimer(timer, 10 ** chance.uniform(-4.5, -0.7))
                    while (done := training.done()) < BATCHES:
                        if done >= 3 and not evaluated:
                            training.evaluate()
                            evaluated = True
                        training.call(*training.batches[done])
                    xla_amp.sync()
                    break
                finally:
                    signal.setitimer(timer, 0)
            except Interrupted:
                arrived += 1
                training.go_on()
            except Exception as error:
                errors[f"{type(error).__name__}: {error}"[:150]] += 1
                break
        settle()
        if lost := training.lost():
            wrong += 1
            errors[f"wrong: {lost[:4]}"] += 1
    return arrived, wrong, errors, time.perf_counter() - start


def undisturbed(phase: str) -> dict[str, torch.Tensor]:
    """The values after training without interrupts."""
    training = Training(phase)
    for number, batch in enumerate(training.batches):
        training.call(*batch)
        if number + 1 == 3:
            training.evaluate()
    return training.values()


def in_threads(interrupts: int, seed: int) -> tuple[int, int, collections.Counter[str], float]:
    """Trains on a second thread while the main thread is interrupted: that thread's values are as undisturbed."""
    expected = undisturbed("threads")
    chance = random.Random(seed)
    arrived = wrong = 0
    errors: collections.Counter[str] = collections.Counter()
    start = time.perf_counter()
    while arrived < interrupts:
        found: list[Any] = []

        def work(found: list[Any] = found) -> None:
            try:
                found.append(undisturbed("threads"))
            except BaseException as error:
                found.append(error)

        worker = threading.Thread(target=work)
        worker.start()
        held = torch.ones(3, device=xla_amp.xla_device())
        while not found:  # not is_alive(): a join that was interrupted marks the thread as ended
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-5, 5e-3))
                    time.sleep(0.003)
                    (held * 2).sum()
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupted:
                arrived += 1
        settle()
        if isinstance(found[0], BaseException):
            errors[repr(found[0])[:150]] += 1
        elif different := [name for name in expected if not torch.equal(expected[name], found[0][name])]:
            wrong += 1
            errors[f"wrong: {different[:4]}"] += 1
    return arrived, wrong, errors, time.perf_counter() - start


PHASES = ("plain", "amp", "stock AdamW", "eager loop", "compiled", "threads")


def run(phase: str, interrupts: int, seed: int) -> dict[str, Any]:
    """One phase; returns its counts."""
    for signum in SIGNALS:
        signal.signal(signum, handler)
    function = in_threads if phase == "threads" else lambda n, seed: train(phase, n, seed)
    arrived, wrong, errors, seconds = function(interrupts, seed)
    return {
        "phase": phase, "interrupts": arrived, "wrong": wrong, "errors": dict(errors), "seconds": round(seconds, 1)
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--interrupts", type=int, default=20000, help="of all phases together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--phase", choices=PHASES)
    options = parser.parse_args()
    phases = [options.phase] if options.phase else PHASES
    failed = False
    for phase in phases:
        result = run(phase, options.interrupts // len(phases), options.seed)
        print(json.dumps(result), flush=True)
        failed |= bool(result["wrong"] or result["errors"])
    os._exit(failed)


if __name__ == "__main__":
    main()
