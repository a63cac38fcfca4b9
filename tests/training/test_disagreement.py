"""Processes that come to disagree: an error on all that live, within the timeout; no end by a signal."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import forked
import pytest

from xla_amp.common.config import Process
from xla_amp.errors import EngineError
from xla_amp.lazy.distributed import agreement, consistency

pytestmark = pytest.mark.processes

PROGRAM = Path(__file__).with_name("disagree_program.py")


def run(*cases):
    """(exit status, seconds, text) of both processes, by case."""
    with tempfile.TemporaryDirectory() as folder:
        done = forked.run(PROGRAM, folder, *cases)
        assert done.returncode == 0, done.stderr
        codes = json.loads(Path(folder, "codes.json").read_text())
        return {
            case: [(*codes[f"{case}-{rank}"], Path(folder, f"{case}-{rank}").read_text()) for rank in range(2)]
            for case in cases
        }


def says(found, *words):
    status, _, text = found
    assert status == 1, text
    assert "EngineError: " in text
    for word in words:
        assert word in text


@pytest.mark.full
def test_a_read_an_early_end_and_a_killed_process_end_in_errors_that_name_process_and_line():
    found = run("read", "end", "kill", "rate", "factor", "hold", "hold, function")
    for each in found["rate"]:
        says(each, "number that they read, or the seed of random numbers, is -0.1 on process 0, -0.2 on process 1")
    # What a process does to its own batch is its own affair.
    # And so is a value that it still holds when the next program could overwrite it.
    for case in ("factor", "hold", "hold, function"):
        assert [status for status, *_ in found[case]] == [0, 0], found[case]
    for each in found["read"]:
        says(each, "process 0 (", "process 1 (", "cannot run their next program together")
        says(each, 'print("read", float(loss)) and ', "xla_amp.sync()")
    says(found["end"][0], "process 1 (", "has ended and runs no more", "disagree_program.py:", "xla_amp.sync()")
    status, _, text = found["end"][1]
    assert (status, "process 1 has ended well, but process 0 (" in text) == (1, True)
    says(found["kill"][0], "process 1 (", "has ended without a word: it was killed")


@pytest.mark.full
def test_other_programs_and_other_versions_are_errors_on_both():
    found = run("shape", "order", "optimizer", "evaluate", "version")
    for each in (each for case in ("shape", "order", "optimizer", "evaluate") for each in found[case]):
        says(each, "process 0 (", "process 1 (", "cannot run their next program together", "disagree_program.py:")
    for rank, each in enumerate(found["version"]):
        says(each, f"cannot train with process {1 - rank} (", "version of xla_amp is ", "'0.0.1'")


@pytest.mark.full
def test_a_process_that_is_slow_is_waited_for_and_one_that_ends_or_is_too_late_is_named():
    """Some wait for 20 s; all run at a time."""
    found = run("raise", "kill first", "slow", "stop", "stopped too long", "late")
    says(found["raise"][0], "process 1 (", "has failed (ValueError: this one has had enough)")
    status, _, text = found["raise"][1]
    assert (status, "\nValueError: this one has had enough" in text) == (1, True)
    assert found["kill first"][0][0] == -9
    says(found["kill first"][1], "process 0 (", "has ended without a word: it was killed", "disagree_program.py:")
    for case in ("slow", "stop"):
        assert [status for status, *_ in found[case]] == [0, 0], found[case]
        first, second = (re.findall("finished .*", text) for _, _, text in found[case])
        assert first == second != []
    for each in (found["late"][0], *found["stopped too long"]):
        says(each, "process 0 (", "waited 6 s in vain for process 1 (")
    status, _, text = found["late"][1]  # it sleeps for longer than the others wait for its end
    told = r"process 0 \(.*\) has ended \(.*waited 6 s in vain for process 1 .*\), so process 1 \(.*\) ends"
    assert (status, re.search(told, text) is not None) == (1, True)


@pytest.mark.full
def test_torchrun_starts_a_killed_job_again_and_it_ends_as_an_undisturbed_one(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    # The agent looks so late that the process that lives has ended by itself.
    command += ["--max-restarts", "1", "--monitor-interval", "10", str(PROGRAM.with_name("elastic_program.py"))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XLA_AMP_TIMEOUT": "120"}
    done = subprocess.run([*command, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert re.search(r"EngineError: process 1 \(.*\) has ended without a word: it was killed, or crashed", done.stderr)
    for rank in range(2):
        found = json.loads(Path(tmp_path, f"{rank}.json").read_text())
        disturbed, undisturbed = found["disturbed"], found["undisturbed"]
        assert (found["restarts"], disturbed["first"], undisturbed["first"]) == (1, 7, 0)
        assert disturbed["weights"] == undisturbed["weights"]
        assert disturbed["losses"] == {step: undisturbed["losses"][step] for step in disturbed["losses"]}


# ---- the tree --------------------------------------------------------------------------------------------------------


class Store(dict):
    """What `agreement.connect` uses of JAX's coordinator."""

    def key_value_set(self, key, value):
        self[key] = value

    def blocking_key_value_get(self, key, milliseconds):
        end = time.monotonic() + milliseconds / 1000
        while key not in self:
            if time.monotonic() > end:
                raise TimeoutError(key)
            time.sleep(0.002)
        return self[key]


def connected(count, fanout, timeout=20):
    store = Store()

    def connect(rank):
        place = Process(rank, count, rank, "127.0.0.1:1", timeout, None)
        return agreement.connect(place, store, "process {}".format, fanout=fanout)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(connect, range(count)))


def each(members, digests, program="program of {}"):
    """What `agree` says in each (here: thread), empty where it returns; a digest of None does not come."""

    def agree(member, digest):
        if digest is None:
            return None
        try:
            member.agree(
                digest.encode() * 32,
                lambda: digest.encode(),
                lambda first, one, second, other: f"{first}: {one.decode()}, {second}: {other.decode()}",
                lambda: "train.py:7",
            )
        except EngineError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(agree, members, digests))


@pytest.mark.parametrize(("count", "fanout"), [(2, 16), (7, 2), (5, 1)])
def test_all_go_on_or_all_stop(count, fanout):
    members = connected(count, fanout)
    assert each(members, "a" * count) == [""] * count
    for odd in range(count):  # wherever it is in the tree
        digests = ["b" if rank == odd else "a" for rank in range(count)]
        first, *others = each(members, digests)
        assert set(others) == {first}
        assert f"{odd}: b" in first
        assert each(members, "c" * count) == [""] * count  # what comes after is compared again


def test_a_program_that_failed_in_one_process_makes_the_next_ones_different():
    members = connected(2, 16)
    members[1].failed()
    assert each(members, "aa") == ["0: a, 1: a"] * 2
    members[0].failed()  # at another program
    assert each(members, "aa") == ["0: a, 1: a"] * 2
    members = connected(2, 16)
    for member in members:
        member.failed()
    assert each(members, "aa") == ["", ""]


def test_an_end_reaches_everybody_through_the_tree():
    members = connected(7, 2)
    ends = threading.Thread(target=members[6].leave, args=("process 6 has had enough",), kwargs={"failed": True})
    ends.start()
    texts = each(members[:6], "aaaaaa")
    for rank, text in enumerate(texts):
        assert text.startswith("process 6 has had enough; process ")
        assert "was at its program 1 with collectives, train.py:7" in text, rank
    assert each(members[:6], "aaaaaa") == texts  # from then on nothing runs
    ends.join()


def test_a_process_that_does_not_come_is_waited_for_and_named():
    members = connected(3, 16, timeout=1)
    begin = time.monotonic()
    first, second, _ = each(members, ["a", "a", None])
    assert time.monotonic() - begin < 10
    assert "process 0 waited 1 s in vain for process 2: it is stopped, busy, or went another way" in first
    assert "waited 1 s in vain for" in second
    assert each(members[2:], ["a"])[0].startswith(("process 0 waited", "process 1 waited"))


def test_ends_are_awaited():
    members = connected(3, 16, timeout=5)
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda member: member.leave("end", failed=False), members)) == [""] * 3
    members = connected(3, 16, timeout=5)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda member, bad: member.leave("a bad end", failed=bad), members, (False, True, False)))
    assert found[:2] == ["a bad end", ""]


def test_neighbours_that_have_ended_are_named(monkeypatch):
    members = connected(3, 16)
    assert members[0].gone(0) == []
    members[2].leave("end", failed=True)
    monkeypatch.setattr(consistency, "_agreement", members[:1])
    assert consistency.ended() == ["process 2"]


def test_strangers_are_not_let_in():
    store = Store()
    with ThreadPoolExecutor(2) as pool:
        place = Process(0, 2, 0, "127.0.0.1:1", 20, None)
        first = pool.submit(agreement.connect, place, store, str)
        _, port, _ = store.blocking_key_value_get("xla_amp/agreement/0", 20000).split()
        for words in (b"x" * 20, b""):
            with socket.create_connection(("127.0.0.1", int(port))) as stranger:
                stranger.sendall(words)
        second = pool.submit(agreement.connect, place._replace(rank=1), store, str)
        assert each([first.result(), second.result()], "aa") == ["", ""]


def test_processes_that_cannot_connect_say_so():
    words = "process 0 could not connect to its neighbours among the processes within 1 s"
    with pytest.raises(EngineError, match=words):
        agreement.connect(Process(0, 2, 0, "127.0.0.1:1", 1, None), Store(), "process {}".format)
