"""500 damaged programs: each is one clear error and exit status 1, or still a program that converts.

Never a traceback, a partial output, a file left behind, or the end of the process.
"""

from __future__ import annotations

import collections

import mutations
import pytest

from xla_amp import cli
from xla_amp.stablehlo import guard, io
from xla_amp.stablehlo.program import FORMATS

EACH, GROUPS = 25, 20


@pytest.fixture(scope="module")
def sources():
    return mutations.originals()


@pytest.fixture(autouse=True)
def _less_patience(monkeypatch):
    monkeypatch.setattr(guard, "_TIMEOUT", (3.0, 5e-6))


def outcome(data, tmp_path, capfd, *more) -> tuple[int, str]:
    """Exit status and message of one conversion, after checking what holds for all of them."""
    source, target = tmp_path / "damaged", tmp_path / "out"
    source.write_bytes(data)
    capfd.readouterr()
    status = cli.main(["convert", str(source), "-o", str(target), *more])
    out, err = capfd.readouterr()
    left = {path.name for path in tmp_path.iterdir()}
    if status == 0:
        assert err == ""
        assert left - {"page"} == {"damaged", "out"}
        io.load(target)
        target.unlink()
    else:
        assert status == 1
        assert out == ""
        assert left == {"damaged"}
        assert err.startswith("xla-amp: ")
        assert err.count("\n") == 1, err
        assert len(err) < 1500
    return status, err


def test_the_programs_are_valid_before_the_damage(sources, tmp_path, capfd):
    assert [outcome(data, tmp_path, capfd)[0] for data in sources.values()] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "group", [*range(2), *(pytest.param(group, marks=pytest.mark.full) for group in range(2, GROUPS))]
)
def test_damage_is_told(sources, group, tmp_path, capfd):
    found = collections.Counter()
    for seed in range(group * EACH, (group + 1) * EACH):
        what, data = mutations.mutated(seed, sources)
        status, _ = outcome(data, tmp_path, capfd)
        found[status] += 1
        found[what] += 1
    assert found[1] > EACH // 2  # most mutations make the program invalid


CYCLES = {
    "a function that calls itself": """
        func.func @main(%x: tensor<2x2xf32>) -> tensor<2x2xf32> {
          %0 = stablehlo.dot %x, %x : (tensor<2x2xf32>, tensor<2x2xf32>) -> tensor<2x2xf32>
          %1 = func.call @main(%0) : (tensor<2x2xf32>) -> tensor<2x2xf32>
          return %1 : tensor<2x2xf32> }""",
    "functions that call each other": """
        func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
          %0 = func.call @other(%x) : (tensor<2xf32>) -> tensor<2xf32>
          return %0 : tensor<2xf32> }
        func.func private @other(%x: tensor<2xf32>) -> tensor<2xf32> {
          %0 = func.call @main(%x) : (tensor<2xf32>) -> tensor<2xf32>
          return %0 : tensor<2xf32> }""",
    "values that need each other": """
        func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
          %0 = stablehlo.add %1, %x : tensor<2xf32>
          %1 = stablehlo.add %0, %x : tensor<2xf32>
          return %1 : tensor<2xf32> }""",
    "a region that jumps to itself": """
        func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
        ^bb1(%0: tensor<2xf32>):
          cf.br ^bb1(%0 : tensor<2xf32>) }""",
    "a loop that returns another loop's value": """
        func.func @main(%x: tensor<f32>) -> tensor<f32> {
          %0 = stablehlo.while(%a = %x) : tensor<f32>
            cond { %c = stablehlo.constant dense<true> : tensor<i1> stablehlo.return %c : tensor<i1> }
            do { stablehlo.return %0 : tensor<f32> }
          return %0 : tensor<f32> }""",
}


@pytest.mark.parametrize("name", CYCLES)
@pytest.mark.parametrize("more", [[], ["--report"]], ids=["", "report"])
def test_cycles_are_told_or_left_alone(name, more, tmp_path, capfd):
    """MLIR allows recursive functions: they convert, and are rejected where calls must be inlined."""
    outcome(CYCLES[name].encode(), tmp_path, capfd, *(f"{each}={tmp_path / 'page'}" for each in more))


def test_every_kind_of_damage_occurs(sources):
    names = collections.Counter(mutations.mutated(seed, sources)[0].partition(",")[0] for seed in range(EACH * GROUPS))
    assert min(names.values()) > 80
    assert set(names) == set(FORMATS)
