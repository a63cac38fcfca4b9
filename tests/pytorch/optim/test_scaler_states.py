"""Loss scales and skipped steps: on every device a loop of any order does what `Model` does in plain Python."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import nn

import xla_amp
from xla_amp import GradScaler, syncfree

SHAPES = [(3, 2), (2,)]
"""Of the parameters of each optimizer."""
SETTINGS = st.fixed_dictionaries(
    {
        "init_scale": st.sampled_from([2.0**-20, 1.0, 2.0**16, 2.0**100]),
        "growth_factor": st.sampled_from([2.0, 1.5, 3.0]),
        "backoff_factor": st.sampled_from([0.5, 0.25, 0.875]),
        "growth_interval": st.integers(1, 3),
    }
)
Values = list[np.ndarray]


class Model:
    """What is promised: the rule of the scale, of its counts, and that optimizers skip what is not finite."""

    def __init__(self, front: Any, options: dict[str, Any]) -> None:
        self.scale, self.tracker, self.skipped, self.in_a_row = np.float32(options["init_scale"]), 0, 0, 0
        self.last_was_bad: bool | None = None
        self.options = {"min_scale": 0.0, "max_scale": np.inf, **options}
        self.steps = [front.reference(part) for part in range(2)]

    def step(self, gradients: list[Values], bad: int | None) -> list[bool]:
        """Steps the optimizers; `bad` is the one whose gradients are not finite.  Returns which of them stepped."""
        taken = [part != bad for part in range(2)]
        for part in range(2):
            if taken[part]:
                self.steps[part](gradients[part])
        self.last_was_bad = bad is not None
        self.skipped += self.last_was_bad
        self.in_a_row = self.in_a_row + 1 if self.last_was_bad else 0
        self.tracker = 0 if self.last_was_bad else self.tracker + 1
        if self.last_was_bad:
            self.scale = np.float32(float(self.scale) * self.options["backoff_factor"])
        elif self.tracker == self.options["growth_interval"]:
            self.scale, self.tracker = np.float32(float(self.scale) * self.options["growth_factor"]), 0
        self.scale = np.clip(self.scale, np.float32(self.options["min_scale"]), self.options["max_scale"])
        return taken


def initial(part: int) -> Values:
    """Parameters of an optimizer."""
    rng = np.random.default_rng(part)
    return [rng.normal(size=shape).astype(np.float32) for shape in SHAPES]


def with_bad(gradients: list[Values], bad: tuple[int, int, float] | None) -> list[Values]:
    """The same with an inf or NaN in one of them: (optimizer, parameter, value)."""
    made = [[value.copy() for value in values] for values in gradients]
    if bad is not None:
        part, which, value = bad
        made[part][which][-1] = value
    return made


class OnTorch:
    """Two optimizers and a `GradScaler` on a device."""

    def __init__(self, device: str, make: Any, plain: Any = None) -> None:
        self.device, self.make, self.plain = device, make, plain or make

    def reference(self, part: int) -> Any:
        """torch's optimizer in float64 on the CPU; the steps are its parameters after each."""
        params = [nn.Parameter(torch.tensor(value, dtype=torch.float64)) for value in initial(part)]
        optimizer = self.plain(params)

        def step(gradients: Values | None = None) -> Values:
            if gradients is not None:
                for parameter, gradient in zip(params, gradients, strict=True):
                    parameter.grad = torch.tensor(gradient, dtype=torch.float64)
                optimizer.step()
            return [parameter.detach().numpy() for parameter in params]

        return step

    def start(self, options: dict[str, Any]) -> None:
        self.place = xla_amp.xla_device() if self.device == "xla" else torch.device(self.device)
        self.params = [[nn.Parameter(torch.tensor(v).to(self.place)) for v in initial(part)] for part in range(2)]
        self.optimizers = [self.make(params) for params in self.params]
        self.options, self.scaler = options, GradScaler(self.place, **options)

    def step(self, gradients: list[Values], bad: tuple[int, int, float] | None, unscale: bool) -> None:
        factor = self.scaler.scale(torch.ones((), device=self.place))
        for params, values in zip(self.params, with_bad(gradients, bad), strict=True):
            for parameter, value in zip(params, values, strict=True):
                parameter.grad = torch.tensor(value).to(self.place) * factor
        for number, optimizer in enumerate(self.optimizers):
            if unscale and number == 0:
                self.scaler.unscale_(optimizer)
            self.scaler.step(optimizer)
        self.scaler.update()
        xla_amp.sync()
        skipped = self.scaler.step_was_skipped()
        assert (skipped.device.type, skipped.dtype) == (self.place.type, torch.bool)
        assert bool(skipped) is (bad is not None)

    def values(self, part: int) -> dict[Any, np.ndarray]:
        """Parameters, by number, and state of an optimizer."""
        params, optimizer = self.params[part], self.optimizers[part]
        named = {(i, name): v for i, p in enumerate(params) for name, v in optimizer.state.get(p, {}).items()}
        named |= dict(enumerate(params))
        return {k: v.detach().cpu().numpy().copy() for k, v in named.items() if isinstance(v, torch.Tensor)}

    def numbers(self) -> dict[str, float]:
        state = self.scaler.state_dict()
        return {
            "scale": state["scale"],
            "tracker": state["_growth_tracker"],
            "skipped": int(self.scaler.skipped_steps()),
            "in_a_row": int(self.scaler.consecutive_skips()),
        }

    def change(self, options: dict[str, Any]) -> None:
        for name, value in options.items():
            getattr(self.scaler, f"set_{name}")(value)

    def set_scale(self, value: Any) -> None:
        self.scaler.scale(torch.ones((), device=self.place))  # which a scaler that was loaded has not done
        self.scaler.update(value)

    def reload(self, how: str) -> bool:
        """Replaces the scaler with a saved one; returns whether its counts go with it."""
        if how == "pickle":
            self.scaler = pickle.loads(pickle.dumps(self.scaler))
            return True
        state = self.scaler.state_dict()
        if how == "of torch":
            theirs = torch.amp.GradScaler("cpu")
            theirs.load_state_dict(state)
            state = theirs.state_dict()
        bounds = {name: value for name, value in self.options.items() if name in ("min_scale", "max_scale")}
        self.scaler = GradScaler(self.place, init_scale=bounds.get("min_scale", 2.0), **bounds)
        self.scaler.load_state_dict(state)
        return False


class Machine(RuleBasedStateMachine):
    """A loop."""

    def __init__(self, front: Any) -> None:
        super().__init__()
        self.front, self.number = front, 0

    @initialize(options=SETTINGS, bounded=st.booleans())
    def start(self, options: dict[str, Any], bounded: bool) -> None:
        if bounded:
            options |= {"min_scale": options["init_scale"] / 2, "max_scale": options["init_scale"] * 1.25}
        self.front.start(options)
        self.model = Model(self.front, options)
        self.values = [self.front.values(part) for part in range(2)]

    def stepped(self, bad: tuple[int, int, float] | None, unscale: bool) -> None:
        rng = np.random.default_rng(100 + self.number)
        gradients = [[rng.uniform(-1, 1, shape).astype(np.float32) for shape in SHAPES] for _ in range(2)]
        self.front.step(gradients, bad, unscale)
        self.number += 1
        for part, taken in enumerate(self.model.step(gradients, bad and bad[0])):
            before, after = self.values[part], self.front.values(part)
            stayed = all(after[name].tobytes() == value.tobytes() for name, value in before.items())
            assert stayed is not taken
            self.values[part] = after

    @rule(unscale=st.booleans())
    def good_step(self, unscale: bool) -> None:
        self.stepped(None, unscale)

    @rule(
        part=st.integers(0, 1),
        which=st.integers(0, 1),
        value=st.sampled_from([np.inf, -np.inf, np.nan]),
        unscale=st.booleans(),
    )
    def bad_step(self, part: int, which: int, value: float, unscale: bool) -> None:
        self.stepped((part, which, value), unscale)

    @precondition(lambda self: self.number)
    @rule(
        options=st.fixed_dictionaries(
            {},
            optional={
                "growth_factor": st.sampled_from([2.0, 1.25]),
                "backoff_factor": st.sampled_from([0.5, 0.125]),
                "growth_interval": st.integers(1, 3),
            },
        )
    )
    def change(self, options: dict[str, Any]) -> None:
        self.front.change(options)
        self.model.options |= options

    @precondition(lambda self: self.number)
    @rule(value=st.sampled_from([32, 5.0]), as_tensor=st.booleans())
    def set_scale(self, value: float, as_tensor: bool) -> None:
        self.front.set_scale(torch.tensor(float(value), device=self.front.place) if as_tensor else value)
        self.model.scale = np.float32(value)

    @precondition(lambda self: self.number)
    @rule(how=st.sampled_from(["pickle", "state", "of torch"]))
    def reload(self, how: str) -> None:
        if not self.front.reload(how):
            self.model.skipped = self.model.in_a_row = 0

    @invariant()
    def as_the_model_says(self) -> None:
        if not self.number:
            return
        names = ("scale", "tracker", "skipped", "in_a_row")
        assert self.front.numbers() == {name: getattr(self.model, name) for name in names}
        for part in range(2):
            for number, right in enumerate(self.model.steps[part]()):
                # Steps of 0.05 times something near 1; counting on the device corrects biases in float32.
                np.testing.assert_allclose(self.values[part][number], right, rtol=1e-4, atol=2e-5)


class OnHost(torch.optim.Optimizer):
    """Keeps a count in Python and a moment that begins at 3, as a user's own optimizer may."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(moment=torch.full_like(parameter, 3.0), seen=[0, torch.zeros(())])
                state["moment"] = state["moment"] * 0.5 + parameter.grad
                state["seen"][0] += 1
                state["seen"][1] += 1
                parameter.sub_(state["moment"] / group["count"] / state["seen"][0])


FRONTS = {
    "native SGD": lambda: OnTorch("cpu", lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)),
    "native syncfree.AdamW": lambda: OnTorch(
        "cpu", lambda p: syncfree.AdamW(p, lr=0.05), lambda p: torch.optim.AdamW(p, lr=0.05)
    ),
    "native optimizer on the host": lambda: OnTorch("cpu", OnHost),
    "native fused Adam": lambda: OnTorch("cpu", lambda p: torch.optim.Adam(p, lr=0.05, fused=True)),
    "XLA fused SGD": lambda: OnTorch("xla", lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True)),
    "XLA Adam": lambda: OnTorch("xla", lambda p: torch.optim.Adam(p, lr=0.05, amsgrad=True, foreach=False)),
    "XLA syncfree.SGD": lambda: OnTorch(
        "xla", lambda p: syncfree.SGD(p, lr=0.05, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)
    ),
    "XLA wrapped RMSprop": lambda: OnTorch(
        "xla",
        lambda p: syncfree.wrap(torch.optim.RMSprop(p, lr=0.05, momentum=0.5)),
        lambda p: torch.optim.RMSprop(p, lr=0.05, momentum=0.5),
    ),
    "XLA optimizer on the host": lambda: OnTorch("xla", OnHost),
}


# The same loops in each run; what fails is at most ten steps long, so it is not made shorter.
RUNS = settings(
    max_examples=20,
    stateful_step_count=10,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
ON_XLA = settings(RUNS, max_examples=6)
"""A step takes ten times as long there."""


@pytest.mark.filterwarnings("ignore:.*keeps state on the host")
@pytest.mark.parametrize("front", FRONTS)
def test_a_loop_does_what_the_model_does(front: str) -> None:
    made = FRONTS[front]()
    run_state_machine_as_test(lambda: Machine(made), settings=ON_XLA if front.startswith("XLA") else RUNS)


def test_state_on_the_host_is_warned_about() -> None:
    class Counting(OnHost):
        """Not warned about yet."""

    front = OnTorch("xla", Counting)
    front.start({})
    gradients = [initial(2), initial(3)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        front.step(gradients, None, unscale=False)
        front.step(gradients, (1, 1, np.inf), unscale=False)
    assert [str(each.message) for each in caught if "Counting keeps state on the host" in str(each.message)]
    assert [optimizer.param_groups[0]["count"] for optimizer in front.optimizers] == [2, 1]
