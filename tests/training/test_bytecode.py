"""Which decisions depend on a number: what code reads of it is found, and all that is not a decision is refused."""

from __future__ import annotations

import pytest

from xla_amp.training import bytecode

LIMIT = 4


class Counts:
    """Methods that add to `n`: first those that decide by it, with what follows from 5 and from 9."""

    every, n = 3, 5

    def adds(self, x):
        self.n += 1

    def adds_by_name(self, x):
        self.n = self.n + x.size(0)

    def divisible(self, x):
        self.n += x.shape[0]
        if (self.n + 1) % self.every == 0:
            x.step()

    def remainder(self, x):
        self.n += 1
        return 1 if not (self.n + 1) % 10 else x

    def below_a_global(self, x):
        self.n -= 1
        if self.n - 2 < LIMIT:
            x.step()

    def in_a_function(self, x):
        self.n += 1
        return lambda: self.n >= 9

    def beside_a_call(self, x):
        self.n += 1
        x.n(3)
        return bool(self.n != 9)

    def of_a_tensor(self, x):
        self.n += 1
        return x * self.n.to(x)


DECISIONS = {
    "adds": [], "adds_by_name": [], "of_a_tensor": [], "divisible": [(True, False)], "remainder": [(True, False)],
    "below_a_global": [(True, False)], "in_a_function": [(False, True)], "beside_a_call": [(True, False)],
}  # fmt: skip


class Reads:
    """Methods in which `n` is read otherwise."""

    def product(self, x):
        self.n += 1
        return x * self.n

    def variable(self, x):
        self.n += 1
        return [m := self.n, m % 2]

    def text(self, x):
        self.n += 1
        return f"{self.n}"

    def index(self, x):
        self.n += 1
        return x[self.n]

    def right_operand(self, x):
        self.n += 1
        return self.n > 3 > self.n

    def member(self, x):
        self.n += 1
        return self.n in (3, 5)

    def argument(self, x):
        self.n += 1
        return self.n == x

    def two_numbers(self, x):
        self.n += 1
        return self.n > self.m

    def another_object(self, x):
        self.n += 1
        x.n = self.n + 1

    def wraps_around(self, x):
        self.n = (self.n + 1) % 10

    def grows_faster(self, x):
        self.n *= 2

    def a_choice(self, x):
        self.n += 1
        return self.n if x else 3

    def computed(self, x):
        self.n += 1
        return self.n // 10

    def not_counted(self, x):
        return self.n == 3


@pytest.mark.parametrize("name", DECISIONS)
def test_what_code_decides_by_a_number(name):
    found = bytecode.tests([getattr(Counts, name)], Counts(), "n", {"n"})
    assert [tuple(bytecode.decide(test, value) for value in (5, 9)) for test in found] == DECISIONS[name]


@pytest.mark.parametrize("name", [each for each in vars(Reads) if not each.startswith("_")])
def test_what_code_reads_otherwise_is_named_by_its_line(name):
    function = vars(Reads)[name]
    with pytest.raises(bytecode.ReadError) as caught:
        bytecode.tests([function], Counts(), "n", {"n", "m"})
    lines = [f"{__file__}:{function.__code__.co_firstlineno + at}" for at in (1, 2)]
    assert str(caught.value) in lines or name == "not_counted"


def test_variables_are_numbers_too():
    count = 0

    def step(x):
        nonlocal count
        count += x
        return count > 3

    (test,) = bytecode.tests([step], None, "count", {"count"})
    assert [bytecode.decide(test, value) for value in (3, 4)] == [False, True]


def test_methods_that_a_method_reaches_by_its_object():
    class Trainer:
        def step(self):
            self.update()
            self.model.train()
            return self.rate

        def update(self):
            self.log()

        def log(self):
            pass

        @property
        def rate(self):
            return 1

        def train(self):
            self.step()

    assert [each.__name__ for each in bytecode.methods(Trainer.step, Trainer)] == ["step", "update", "rate", "log"]
