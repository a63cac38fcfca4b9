"""Evaluations, checkpoints and exceptions between the steps of a training: its values stay those of the steps alone."""

from __future__ import annotations

import io
import random

import interrupt_fuzz
import pytest
import torch

STEPS = 130


class Training(interrupt_fuzz.Training):
    """A model with batch norm and dropout, a loss scaler, and what goes between the steps."""

    def __init__(self) -> None:
        super().__init__("amp")

    def next(self) -> None:
        self.step(*self.batches[self.done() % len(self.batches)])

    def reloaded(self) -> Training:
        """New objects with this state, through a file."""
        file = io.BytesIO()
        parts = self.model, self.optimizer, self.scaler
        torch.save(([part.state_dict() for part in parts], torch.get_device_module(self.device).get_rng_state()), file)
        file.seek(0)
        states, drawn = torch.load(file)
        other = Training()
        for part, state in zip((other.model, other.optimizer, other.scaler), states, strict=True):
            part.load_state_dict(state)
        torch.get_device_module(self.device).set_rng_state(drawn.cpu())
        return other

    def raise_something(self, which: int) -> None:
        """A call that raises, as on the CPU, and changes nothing."""
        weight = self.model[0].weight
        if which == 0:
            self.model[0](torch.ones(2, 3, device=self.device))  # a wrong shape
        elif which == 1:
            weight & weight
        elif which == 2:
            weight[torch.tensor([99]).to(self.device)]
        else:
            copy = weight.detach().clone().requires_grad_()
            copy.register_hook(lambda gradient: 1 / 0)
            (copy * 2).sum().backward()


@pytest.mark.full
def test_disturbed_training_equals_undisturbed_training_bit_for_bit() -> None:
    undisturbed = Training()
    for _ in range(STEPS):
        undisturbed.next()
    expected = undisturbed.values()
    chance, training = random.Random(0), Training()
    for number in range(STEPS):
        if number % 20 == 7:
            with pytest.raises((RuntimeError, IndexError, ZeroDivisionError, NotImplementedError)):
                training.raise_something(chance.randrange(4))
        if number % 25 == 11:
            training.evaluate()
        if number % 50 == 49:
            training = training.reloaded()
        training.next()
    found = training.values()
    assert [name for name, value in expected.items() if not torch.equal(value, found[name])] == []
