"""500 damaged programs: each is one clear error and exit status 1, or still a program that converts.

Never a traceback, a partial output, a file left behind, or the end of the process.
"""

from __future__ import annotations

import collections

import mutations
import pytest

from xla_amp import cli
from xla_amp.stablehlo import files

EACH, GROUPS = 25, 20


@pytest.fixture(scope="module")
def sources():
    return mutations.originals()


@pytest.fixture(autouse=True)
def _less_patience(monkeypatch):
    monkeypatch.setattr(files, "_PATIENCE", (3.0, 5e-6))


def outcome(data, tmp_path, capfd) -> tuple[int, str]:
    """Exit status and message of one conversion, after checking what holds for all of them."""
    source, target = tmp_path / "damaged", tmp_path / "out"
    source.write_bytes(data)
    capfd.readouterr()
    status = cli.main(["convert", str(source), "-o", str(target)])
    out, err = capfd.readouterr()
    left = {path.name for path in tmp_path.iterdir()}
    if status == 0:
        assert err == ""
        assert left == {"damaged", "out"}
        files.load(target)
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


@pytest.mark.parametrize("group", range(GROUPS))
def test_damage_is_told(sources, group, tmp_path, capfd):
    found = collections.Counter()
    for seed in range(group * EACH, (group + 1) * EACH):
        what, data = mutations.mutated(seed, sources)
        status, _ = outcome(data, tmp_path, capfd)
        found[status] += 1
        found[what] += 1
    assert found[1] > EACH // 2  # most damage is damage


def test_every_kind_of_damage_occurs(sources):
    names = collections.Counter(mutations.mutated(seed, sources)[0].partition(",")[0] for seed in range(EACH * GROUPS))
    assert min(names.values()) > 80
    assert set(names) == set(files.FORMATS)
