"""Python state of every kind that a captured step can see: a change counts in the next call, or the step is refused.

Each program gives a step and a function that changes what the step sees.
"""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import enum
import functools
import importlib
import itertools
import operator
import os
import random
import re
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import xla_amp
from xla_amp.errors import CaptureError, XlaAmpWarning

DEVICE = "jax:0"
settings = types.ModuleType("settings")
CFG = {"alpha": 2.0}
NP = np.float32(2)
ARR = np.ones(3, np.float32)
V = contextvars.ContextVar("V", default=2.0)
FILES: list[Any] = []
PROGRAMS: dict[str, Callable[[], tuple[Callable[..., Any], Callable[[], Any]]]] = {}
REFUSED = {
    "rand": r"random.random, .*which cannot be compared; draw on the device",
    "iterator": "it, a list_iterator, which cannot be compared",
    "generator": "it, a generator, which cannot be compared",
    "file": "fh, a _io.BufferedReader, which cannot be compared",
    "clock": "time.time, .*which cannot be compared; pass the time as an argument",
    "a_globals": r"calls globals\(\), which can see every global",
    "nan": "computes nan for add.*, a number that changes",
    "many_values": "more than 4,000 Python values, most of them in many, a list .200,000 items.; keep that in a tensor",
    "large_array": "its 4,000,000 bytes on the host are too many; move them to the device",
}
"""Programs that are not captured -> the words of the warning."""
QUICK = (
    "a_list", "a_set", "class_", "module", "computed_name", "scalar", "array", "int_float", "true_", "negzero",
    "selfcfg", "a_partial", "fun_in_container", "slots", "env", "bw", "statereplaced", "proxy", "wrapped", "iterator",
    "file", "many_values", "rand", "module_by_text", "names_in_a_tuple", "another_module", "another_part_of_a_module",
    "a_tuple_of_a_module", "another_class_of_a_module",
)  # fmt: skip
"""Programs of the default run."""


TWO_FORMS = {"bw", "tensorhook"}
"""Programs whose first call finds a parameter without a gradient, which is another form of the step."""


class K:
    A = 2.0


def program(function):
    PROGRAMS[function.__name__] = function
    return function


def put(container, key, value):
    container[key] = value


@pytest.fixture(scope="module", autouse=True)
def device():
    settings.ALPHA, settings.T = 2.0, {"k": [1.0]}
    sys.modules["settings"] = settings
    yield xla_amp.xla_device()
    del sys.modules["settings"]


@program
def a_dict():
    c = {"alpha": 2.0}
    return lambda x: x * c["alpha"], lambda: put(c, "alpha", 3.0)


@program
def a_list():
    c = [2.0]
    return lambda x: x * c[0], lambda: put(c, 0, 3.0)


@program
def a_set():
    c = {2.0}
    return lambda x: x * max(c), lambda: c.add(5.0)


@program
def a_tuple():
    c = (2.0,)

    def f(x):
        return x * c[0]

    def m():
        nonlocal c
        c = (3.0,)

    return f, m


@program
def glob():
    return lambda x: x * CFG["alpha"], lambda: put(CFG, "alpha", CFG["alpha"] + 1)


@program
def class_():
    return lambda x: x * K.A, lambda: setattr(K, "A", K.A + 1)


@program
def module():
    return lambda x: x * settings.ALPHA, lambda: setattr(settings, "ALPHA", settings.ALPHA + 1)


@program
def module_container():
    return lambda x: x * settings.T["k"][0], lambda: put(settings.T["k"], 0, 7.0)


@program
def computed_name():
    n = "ALP"
    return lambda x: x * getattr(settings, n + "HA"), lambda: setattr(settings, "ALPHA", settings.ALPHA + 1)


@program
def imp():
    def f(x):
        import settings as s

        return x * s.ALPHA

    return f, lambda: setattr(settings, "ALPHA", settings.ALPHA + 1)


@program
def imp2():
    def f(x):
        from settings import ALPHA

        return x * ALPHA

    return f, lambda: setattr(settings, "ALPHA", settings.ALPHA + 1)


@program
def scalar():
    return lambda x: x * float(NP), lambda: globals().__setitem__("NP", NP + 1)


@program
def array():
    return lambda x: x * float(ARR[0]), lambda: put(ARR, 0, ARR[0] + 1)


@program
def cpu_tensor():
    t = torch.tensor(2.0)
    return lambda x: x * t, lambda: t.fill_(3)


@program
def cpu_np():
    a = np.ones(3, np.float32)
    t = torch.from_numpy(a)
    return lambda x: x * t.to(DEVICE), lambda: put(a, 0, 9)


@program
def int_float():
    c = [2]
    return lambda x: x.long() * c[0], lambda: put(c, 0, 2.0)


@program
def true_():
    c = [1]
    return lambda x: x.bool() * c[0], lambda: put(c, 0, True)


@program
def negzero():
    c = [0.0]
    return lambda x: 1 / (x * c[0]), lambda: put(c, 0, -0.0)


@program
def nan():
    c = [float("nan")]
    return lambda x: x + c[0], lambda: put(c, 0, float("nan"))


@program
def selfcfg():
    class M(torch.nn.Module):
        def __init__(s):
            super().__init__()
            s.cfg = {"alpha": 2.0}
            s.o = types.SimpleNamespace(a=types.SimpleNamespace(b=2.0))

        def forward(s, x):
            return x * s.cfg["alpha"] * s.o.a.b

    m = M()
    return m, lambda: setattr(m.o.a, "b", 5.0)


@program
def selfcfg2():
    class M(torch.nn.Module):
        def __init__(s):
            super().__init__()
            s.cfg = {"alpha": 2.0}

        def forward(s, x):
            return x * s.cfg["alpha"]

    m = M()
    return (lambda x: m(x)), lambda: put(m.cfg, "alpha", 5.0)


@program
def a_partial():
    c = {"a": 2.0}
    return functools.partial(lambda c, x: x * c["a"], c), lambda: put(c, "a", 3.0)


@program
def fun_in_container():
    c = [2.0]
    fs = {"f": lambda x: x * c[0]}
    return lambda x: fs["f"](x), lambda: put(c, 0, 3.0)


@program
def fun_replaced():
    fs = {"f": lambda x: x * 2}
    return lambda x: fs["f"](x), lambda: put(fs, "f", lambda x: x * 3)


@program
def a_default():
    def f(x, c=[2.0]):  # noqa: B006  (the subject)
        return x * c[0]

    return f, lambda: put(f.__defaults__[0], 0, 3.0)


@program
def defaults2():
    def g(x, a=2.0):
        return x * a

    return lambda x: g(x), lambda: setattr(g, "__defaults__", (3.0,))


@program
def kwdefaults():
    def g(x, *, a=2.0):
        return x * a

    return lambda x: g(x), lambda: put(g.__kwdefaults__, "a", 3.0)


@program
def code():
    def g(x):
        return x * 2

    def h(x):
        return x * 3

    return lambda x: g(x), lambda: setattr(g, "__code__", h.__code__)


@program
def method():
    class T:
        def __init__(s):
            s.a = 2.0

        def m(s, x):
            return x * s.a

    t = T()
    return t.m, lambda: setattr(t, "a", 3.0)


@program
def method_replaced():
    class T:
        def m(s, x):
            return x * 2

    t = T()
    return lambda x: t.m(x), lambda: setattr(T, "m", lambda s, x: x * 3)


@program
def method_instance():
    class T:
        def m(s, x):
            return x * 2

    t = T()
    return lambda x: t.m(x), lambda: setattr(t, "m", lambda x: x * 3)


@program
def prop():
    class T:
        _a = 2.0

        @property
        def a(s):
            return s._a

    t = T()
    return lambda x: x * t.a, lambda: setattr(t, "_a", 3.0)


@program
def enumeration():
    class E(enum.Enum):
        A = 2.0
        B = 3.0

    c = [E.A]
    return lambda x: x * c[0].value, lambda: put(c, 0, E.B)


@program
def dc():
    @dataclasses.dataclass
    class C:
        a: float = 2.0

    c = C()
    return lambda x: x * c.a, lambda: setattr(c, "a", 3.0)


@program
def dc_asdict():
    @dataclasses.dataclass
    class C:
        a: float = 2.0

    c = C()
    return lambda x: x * sum(dataclasses.asdict(c).values()), lambda: setattr(c, "a", 3.0)


@program
def nt():
    N = collections.namedtuple("N", "a b")
    c = [N(2.0, [1.0])]
    return lambda x: x * c[0].b[0], lambda: put(c[0].b, 0, 3.0)


@program
def deque():
    c = collections.deque([2.0])
    return lambda x: x * c[0], lambda: (c.popleft(), c.append(3.0))


@program
def slots():
    class S:
        __slots__ = ("a",)

    s = S()
    s.a = 2.0
    return lambda x: x * s.a, lambda: setattr(s, "a", 3.0)


@program
def ctx():
    return lambda x: x * V.get(), lambda: V.set(3.0)


@program
def env():
    os.environ["XLA_AMP_TEST_ALPHA"] = "2"
    return lambda x: x * float(os.environ["XLA_AMP_TEST_ALPHA"]), lambda: put(os.environ, "XLA_AMP_TEST_ALPHA", "3")


@program
def env2():
    os.environ["XLA_AMP_TEST_ALPHA"] = "2"
    return lambda x: x * float(os.getenv("XLA_AMP_TEST_ALPHA")), lambda: put(os.environ, "XLA_AMP_TEST_ALPHA", "3")


@program
def a_vars():
    return lambda x: x * vars(settings)["ALPHA"], lambda: setattr(settings, "ALPHA", settings.ALPHA + 1)


@program
def a_globals():
    return lambda x: x * globals()["CFG"]["alpha"], lambda: put(CFG, "alpha", CFG["alpha"] + 1)


@program
def attrgetter():
    g = operator.attrgetter("ALPHA")
    return lambda x: x * g(settings), lambda: setattr(settings, "ALPHA", settings.ALPHA + 1)


@program
def module_by_text():
    return lambda x: x * sys.modules["settings"].ALPHA, lambda: setattr(settings, "ALPHA", settings.ALPHA + 1)


@program
def module_imported_by_text():
    name = "settings"

    def m():
        settings.ALPHA += 1

    return lambda x: x * importlib.import_module(name).ALPHA, m


@program
def names_in_a_tuple():
    table = [2.0]
    c = Holder(table)

    def f(x):
        for name in ("value",):
            x = x * getattr(c, name)[0]
        return x

    return f, lambda: put(table, 0, 3.0)


@program
def wrapped():
    def deco(f):
        k = [2.0]
        deco.k = k

        @functools.wraps(f)
        def w(x):
            return f(x) * k[0]

        return w

    @deco
    def f(x):
        return x * 1

    return lambda x: f(x), lambda: put(deco.k, 0, 3.0)


@program
def nograd():
    c = [2.0]

    @torch.no_grad()
    def f(x):
        return x * c[0]

    return f, lambda: put(c, 0, 3.0)


@program
def hook():
    m = torch.nn.Linear(3, 3).to(DEVICE)
    c = [2.0]
    m.register_forward_hook(lambda m, i, o: o * c[0])
    return lambda x: m(x).detach(), lambda: put(c, 0, 3.0)


@program
def tensorhook():
    c = [2.0]
    w = torch.nn.Parameter(torch.ones(3, device=DEVICE))
    w.register_hook(lambda g: g * c[0])

    def f(x):
        w.grad = None
        (w * x).sum().backward()
        return w.grad * 1

    return f, lambda: put(c, 0, 3.0)


@program
def bw():
    c = [2.0]

    def helper():
        return c[0]

    class F(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            k = helper()
            return g * k

    w = torch.nn.Parameter(torch.ones(3, device=DEVICE))

    def f(x):
        w.grad = None
        F.apply(w * x).sum().backward()
        return w.grad * 1

    return f, lambda: put(c, 0, 3.0)


@program
def globalhook():
    m = torch.nn.Linear(3, 3).to(DEVICE)
    return lambda x: m(x).detach(), lambda: torch.nn.modules.module.register_module_forward_hook(lambda m, i, o: o * 2)


@program
def reqgrad():
    w = torch.nn.Parameter(torch.ones(3, device=DEVICE))
    v = torch.nn.Parameter(torch.ones(3, device=DEVICE))

    def f(x):
        w.grad = None
        (w * x * v).sum().backward()
        g = w.grad * 1
        w.grad = None
        v.grad = None
        return g

    return f, lambda: v.requires_grad_(False)


@program
def statereplaced():
    t = types.SimpleNamespace(w=torch.ones(3, device=DEVICE))
    old = []

    def m():
        old.append(t.w)
        t.w = torch.full((3,), 5.0, device=DEVICE)

    return lambda x: x * t.w, m


class Scale(torch.nn.Module):
    def __init__(self, by):
        super().__init__()
        self.by = by

    def forward(self, x):
        return x * self.by


class Shift(Scale):
    def forward(self, x):
        return x + self.by


@program
def another_module():
    m = Scale(2.0)

    def change():
        nonlocal m
        m = Scale(m.by + 1)

    return lambda x: m(x), change


@program
def a_tuple_of_a_module():
    m = torch.nn.Sequential(Scale(1.0), Scale((2,)))
    m[1].forward = lambda x: x.long() * m[1].by[0]

    def change():
        m[1].by = (2.0,)

    return lambda x: m(x), change


@program
def another_class_of_a_module():
    m = torch.nn.Sequential(Scale(2.0), Scale(3.0), Shift(4.0))
    return lambda x: m(x), lambda: setattr(m[1], "__class__", Shift)


@program
def another_part_of_a_module():
    m = torch.nn.Sequential(Scale(2.0), Scale(3.0))
    c = [m[0]]
    return lambda x: m(x) + c[0](x), lambda: put(c, 0, m[1])


@program
def data():
    w = torch.ones(3, device=DEVICE)
    old = []

    def m():
        old.append(w.data.view(3))
        w.data = torch.full((3,), 5.0, device=DEVICE)

    return lambda x: x * w, m


@program
def rand():
    return lambda x: x * (1.0 if random.random() < 2 else 2.0), lambda: None


@program
def iterator():
    it = iter([1.0] * 100)
    return lambda x: x * next(it), lambda: None


@program
def generator():
    it = (1.0 for _ in range(100))
    return lambda x: x * next(it), lambda: None


@program
def proxy():
    class G:
        def __init__(s):
            s.d = {"a": 2.0}

        def __getattribute__(s, n):
            return object.__getattribute__(s, "d")[n]

    g = G()
    return lambda x: x * g.a, lambda: put(object.__getattribute__(g, "d"), "a", 3.0)


@program
def getattr_m():
    class G:
        def __init__(s):
            s.d = {"a": 2.0}

        def __getattr__(s, n):
            return s.d[n]

    g = G()
    return lambda x: x * g.a, lambda: put(g.d, "a", 3.0)


@program
def chainmap():
    c = collections.ChainMap({}, {"a": 2.0})
    return lambda x: x * c["a"], lambda: put(c.maps[1], "a", 3.0)


@program
def counter():
    c = collections.Counter(a=2)
    return lambda x: x * c["a"], lambda: c.update(a=1)


@program
def lr():
    w = torch.nn.Parameter(torch.ones(3, device=DEVICE))
    o = torch.optim.SGD([w], lr=0.5)
    return lambda x: x * o.param_groups[0]["lr"], lambda: put(o.param_groups[0], "lr", 0.25)


@program
def optimizer_state():
    w = torch.nn.Parameter(torch.ones(3, device=DEVICE))
    o = torch.optim.SGD([w], lr=0.5, momentum=0.9)
    w.sum().backward()
    o.step()
    old = []

    def m():
        for s in o.state.values():
            old.append(s["momentum_buffer"])
            s["momentum_buffer"] = torch.full((3,), 4.0 + len(old), device=DEVICE)

    return lambda x: x * o.state[w]["momentum_buffer"], m


@program
def file():
    fh = open("/dev/zero", "rb")  # noqa: SIM115
    FILES.append(fh)
    return lambda x: x * (1.0 + fh.read(1)[0]), lambda: None


@program
def clock():
    return lambda x: x * (1.0 if time.time() > 0 else 2.0), lambda: None


@program
def local():
    values = threading.local()
    values.a = 2.0
    return lambda x: x * values.a, lambda: setattr(values, "a", 3.0)


@program
def callable():
    class C:
        a = 2.0

        def __call__(s, x):
            return x * s.a

    c = C()
    return c, lambda: setattr(c, "a", 3.0)


@program
def meta():
    class Meta(type):
        a = 2.0

    class C(metaclass=Meta):
        pass

    return lambda x: x * C.a, lambda: setattr(Meta, "a", 3.0)


@program
def desc():
    class D:
        def __init__(s):
            s.v = 2.0

        def __get__(s, o, t):
            return s.v

    dd = D()

    class C:
        a = dd

    c = C()
    return lambda x: x * c.a, lambda: setattr(dd, "v", 3.0)


@program
def lru():
    c = [2.0]

    @functools.lru_cache
    def g():
        return c[0]

    def m():
        c[0] = 3.0
        g.cache_clear()

    return lambda x: x * g(), m


@program
def obj_arg():
    c = types.SimpleNamespace(a=2.0)
    return functools.partial(lambda x, c: x * c.a, c=c), lambda: setattr(c, "a", 3.0)


@program
def od():
    c = collections.OrderedDict(a=2.0, b=3.0)
    return lambda x: x * next(iter(c.values())), lambda: c.move_to_end("a")


@program
def mp():
    c = {"a": 2.0}
    p = types.MappingProxyType(c)
    return lambda x: x * p["a"], lambda: put(c, "a", 3.0)


@program
def byte_array():
    c = bytearray(b"\2")
    return lambda x: x * c[0], lambda: put(c, 0, 3)


@program
def fnattr():
    def f(x):
        return x * f.a

    f.a = 2.0
    return f, lambda: setattr(f, "a", 3.0)


@program
def torchconst():
    torch.my_alpha = 2.0
    return lambda x: x * torch.my_alpha, lambda: setattr(torch, "my_alpha", 3.0)


@program
def sched():
    w = torch.nn.Parameter(torch.ones(3, device=DEVICE))
    o = torch.optim.SGD([w], lr=0.5)
    s = torch.optim.lr_scheduler.ExponentialLR(o, 0.5)
    o.step()
    return lambda x: x * s.get_last_lr()[0], lambda: s.step()


@program
def numbersub():
    class Fl(float):
        pass

    c = [Fl(2.0)]
    return lambda x: x * float(c[0]), lambda: put(c, 0, Fl(3.0))


@program
def nested_step():
    c = [2.0]
    inner = xla_amp.compile(lambda x: x * c[0])
    return lambda x: inner(x) + 1, lambda: put(c, 0, 3.0)


@program
def many_values():
    many = list(range(200_000))
    return lambda x: x * many[3], lambda: put(many, 3, 5)


@program
def large_array():
    values = np.ones(1_000_000, np.float32)
    return lambda x: x * float(values[0]), lambda: put(values, 0, 5)


def is_same(one, other):
    one, other = one.detach().cpu(), other.detach().cpu()
    return one.dtype == other.dtype and torch.equal(one.double().nan_to_num(7.5), other.double().nan_to_num(7.5))


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in PROGRAMS]
)
def test_a_change_counts_or_is_refused(name, device):
    step, change = PROGRAMS[name]()
    compiled, x = xla_amp.compile(step), torch.ones(3, device=device)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(6):
                compiled(x)
            replays = compiled.replays
            for _ in range(2):
                change()
                for _ in range(2):
                    found = compiled(x)
                    assert is_same(found, step(x))
    finally:
        torch.nn.modules.module._global_forward_hooks.clear()
        while FILES:
            FILES.pop().close()
    told = [warning for warning in caught if warning.category is XlaAmpWarning]
    if name in REFUSED:
        assert replays == 0
        [warning] = told
        assert re.search(REFUSED[name], str(warning.message), re.DOTALL)
        assert warning.filename == __file__
    else:
        assert replays == (3 if name in TWO_FORMS else 4)
        assert told == []


def test_a_hook_of_all_modules_that_is_removed_counts(device):
    module = torch.nn.Linear(2, 2).to(device)
    step, x = xla_amp.compile(lambda x: module(x).detach(), strict=True), torch.ones(1, 2, device=device)
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, args, result: result * 2)
    try:
        for _ in range(4):
            found = step(x)
    finally:
        handle.remove()
    assert step.replays == 2
    assert torch.equal(found.cpu(), 2 * step(x).cpu())


def test_gradients_of_two_modules_by_turns(device):
    modules = [torch.nn.Linear(2, 2).to(device), torch.nn.Linear(2, 2).to(device)]
    current = modules[0]

    def step(x):
        current(x).square().sum().backward()
        return x * 1

    compiled = xla_amp.compile(step, strict=True, limit=100)
    for call in range(30):
        current = modules[(call // 3) % 2]
        x, grads = torch.full((2,), 0.1 * call, device=device), []
        for run in (step, compiled):
            for module in modules:
                module.zero_grad()
            run(x)
            grads.append([None if p.grad is None else p.grad.tolist() for m in modules for p in m.parameters()])
        assert grads[0] == grads[1]
    assert compiled.replays > 10


def test_what_only_other_methods_use_is_not_compared(device):
    class Trainer:
        def __init__(self):
            self.loader = itertools.cycle([1.0, 2.0])
            self.history, self.count, self.scale = [], 0, 2.0
            self.step = xla_amp.compile(self._step, strict=True)

        def _step(self, x):
            return x * self.scale

        def train(self):
            for _ in range(6):
                self.history.append(self.step(torch.full((2,), next(self.loader), device=DEVICE)))
                self.count += 1

    trainer = Trainer()
    trainer.train()
    assert trainer.step.replays == 4
    trainer.scale = 3.0
    trainer.train()
    assert [float(each[0]) for each in trainer.history] == [2.0, 4.0] * 3 + [3.0, 6.0] * 3
    assert trainer.step.replays == 8


ARGUMENTS = {
    "zero": (lambda x, a: 1 / (x * a), lambda: (0.0, -0.0)),
    "array": (lambda x, a: x * float(a[0]), lambda: (np.ones(2), np.full(2, 3.0))),
    "object": (lambda x, a: x * a.value, lambda: (Holder(2.0), Holder(3.0))),
    "function": (lambda x, a: a(x), lambda: (lambda x: x + 1, lambda x: x + 2)),
    "module": (lambda x, a: a(x), lambda: (Scale(2.0), Shift(2.0))),
    "dictionary of a library": (
        lambda x, a: x * a["b"],
        lambda: (collections.UserDict(b=2.0), collections.UserDict(b=3.0)),
    ),
}
"""Steps, and two values of their argument by turns."""


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_is_compared_as_other_values_are(name, device):
    step, values = ARGUMENTS[name]
    compiled, x, pair = xla_amp.compile(step, strict=True), torch.ones(3, device=device), values()
    for number in range(16):
        value = pair[number // 4 % 2]
        assert is_same(compiled(x, value), step(x, value))
    assert compiled.replays == 12


def test_an_argument_that_changes_in_place_or_cannot_be_compared(device):
    holder, x = Holder(2.0), torch.ones(3, device=device)
    compiled = xla_amp.compile(lambda x, holder: x * holder.value, strict=True)
    for count, value in enumerate((2.0, 2.0, 2.0, 3.0, 3.0, 3.0)):
        holder.value, holder.count = value, count  # the step does not read the latter
        assert compiled(x, holder).tolist() == [value] * 3
    assert compiled.replays == 2
    with pytest.raises(CaptureError, match="argument 1, a list_iterator, which cannot be compared"):
        xla_amp.compile(lambda x, a: x * next(a), strict=True)(x, iter([1.0]))


# ---- random values at random places ----------------------------------------------------------------------------------


class Holder:
    def __init__(self, value):
        self.value = value


class SlotHolder:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


@dataclasses.dataclass
class Data:
    value: Any


def total(value):
    """The sum of all numbers in a structure; reads each kind in its own way."""
    if isinstance(value, (int, float, np.number)):
        return value if isinstance(value, float) else float(value) + 0.5 * isinstance(value, bool)
    if isinstance(value, dict):
        return sum(total(item) * (index + 1) for index, item in enumerate(value.values()))
    if isinstance(value, np.ndarray):
        return float(value.sum())
    if isinstance(value, (list, tuple, collections.deque)):
        return sum(total(item) * (index + 1) for index, item in enumerate(value))
    if isinstance(value, functools.partial):
        return value()
    return total(value.value)


def structure(rng, depth, places):
    """A random structure; `places` gets functions that change one number in it."""
    kind = rng.choice(
        ["dict", "list", "deque", "holder", "slots", "data", "array", "tuple", "partial", "space", "class"]
    )
    if kind == "array":
        array = np.array([rng.random(), rng.random()])
        places.append(lambda value: put(array, rng.randrange(2), float(value)))
        return array
    size = rng.randint(1, 3) if kind in ("dict", "list", "deque", "tuple") else 1
    items = [structure(rng, depth - 1, places) if depth and rng.random() < 0.7 else rng.random() for _ in range(size)]
    if kind == "tuple":
        return (*items, structure(rng, 0, places))
    if kind == "dict":
        new = {f"key{index}": item for index, item in enumerate(items)}
        places.append(lambda value: put(new, f"key{rng.randrange(size + 1)}", value))
        return new
    if kind in ("list", "deque"):
        new = items if kind == "list" else collections.deque(items)
        places.append(lambda value: put(new, rng.randrange(size), value))
        return new
    if kind == "partial":
        return functools.partial(total, items[0])
    if kind == "class":
        new = type("Class", (), {"value": items[0]})
    else:
        new = {"holder": Holder, "slots": SlotHolder, "data": Data, "space": lambda v: types.SimpleNamespace(value=v)}[
            kind
        ](items[0])
    places.append(lambda value: setattr(new, "value", value))
    return new


@pytest.mark.parametrize("cases", [60, pytest.param(1000, marks=pytest.mark.full)])
def test_random_changes_are_never_stale(cases, device):
    rng = random.Random(cases)
    x = torch.ones(2, device=device)
    done = replays = 0
    while done < cases:
        places = []
        state = structure(rng, 3, places)
        if not places:
            continue
        step = xla_amp.compile(lambda x, state=state: x * total(state), limit=10_000, strict=True)
        for _ in range(min(10, cases - done)):
            for _ in range(4):
                assert is_same(step(x), x * total(state))
            rng.choice(places)(rng.choice([rng.random(), rng.random(), 2, 2.0, True, -0.0, 0.0, np.float32(1.5)]))
            assert is_same(step(x), x * total(state))
            done += 1
        replays += step.replays
    assert replays > cases
