"""torch.distributed with the backend "xla_amp": collectives, DistributedDataParallel, what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import forked
import pytest
import scenarios
import torch
import torch.distributed as dist
from process_group_program import MODES, OVERFLOW, STEPS, Partly, own, tokens_of

import xla_amp
from xla_amp.common.config import Process
from xla_amp.errors import DeviceError
from xla_amp.lazy.processes import process_groups
from xla_amp.lazy.torch_integration import c10d

pytestmark = pytest.mark.processes

PROGRAM = Path(__file__).with_name("process_group_program.py")


ONE_EXECUTABLE = [1, 0, 0]
"""And no compilation, no wait of the host."""


def seen(*names):
    """What the two processes saw in scenarios."""
    parts = scenarios.run(PROGRAM, *names, start="group")
    return [{name: each[rank] for name, each in parts.items()} for rank in range(2)]


@pytest.fixture(scope="module")
def found():
    return seen("collectives", "train", "unused", "refusals")


@pytest.fixture(scope="module")
def replicas():
    return seen("buffers")


def test_collectives(found):
    """Against the same sums on the CPU."""
    both = torch.stack([own(0), own(1)])
    kinds = {"SUM": both.sum(0), "AVG": both.mean(0), "MIN": both.amin(0), "MAX": both.amax(0), "PRODUCT": both.prod(0)}
    for rank, process in enumerate(found):
        half = both.sum(0).chunk(2)[rank].tolist()
        parts = [own(other).chunk(2)[rank].tolist() for other in range(2)]
        expected = (
            {"backend": "xla_amp"}
            | {f"all_reduce {name}": value.tolist() for name, value in kinds.items()}
            | {
                **dict.fromkeys(("async", "of the CPU", "functional"), both.sum(0).tolist()),
                "broadcast": own(1).tolist(),
                "all_gather": both.tolist(),
                "all_gather_into_tensor": both.flatten().tolist(),
                **dict.fromkeys(("reduce_scatter", "reduce_scatter_tensor"), half),
                "all_to_all": parts,
                "all_to_all_single": [*parts[0], *parts[1]],
                "objects": [[0, 2.5, [0, 1]], [1, 2.5, [0, 1]]],
                "broadcast objects": [{"seed": 3}, "text"],
                "alone": own(rank).tolist(),
            }
        )
        assert process["collectives"] == expected


def test_torchs_data_parallel_is_one_executable_a_step_and_all_skip_an_overflow(found):
    """Rank 0 reads values after every step and the others do not; the second step rebuilds torch's buckets."""
    first, second = (process["train"] for process in found)
    assert first["weights"] == second["weights"]
    assert first["scale"] == second["scale"] == 2.0**7
    assert first["names"][0] == "module.0.weight"
    for step in range(OVERFLOW - 1, STEPS):
        assert second["counts"][step] == ONE_EXECUTABLE


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
def test_buffers_are_sent_in_the_step(replicas, mode):
    """As torch's class on the CPU, in one executable a step after the second; with gloo each copy is another one."""
    for rank, process in enumerate(replicas):
        (got, read, counts), (expected, read_there, _) = process["buffers"][mode]
        assert list(got) == list(expected)
        for name, value in got.items():
            torch.testing.assert_close(torch.tensor(value), torch.tensor(expected[name]), rtol=0, atol=1e-6)
        assert len(read) == len(read_there) == (rank == 0)
        assert read == pytest.approx(read_there, abs=1e-5)
        assert counts[-1] == ONE_EXECUTABLE or "gloo" in mode


def test_unused_parameters_keep_no_gradient_and_sparse_ones_are_averaged(found):
    """Against one process on the CPU with the average of both gradients."""
    torch.manual_seed(0)
    model = Partly()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(2):
            for part in range(2):
                (model(tokens_of(step, rank, part), step == 2).square().sum() / 2).backward()
        optimizer.step()
    for process in found:
        assert process["unused"]["steps"] == [[1, True], [1, True], [1, False]]
        for got, expected in zip(process["unused"]["weights"], model.parameters(), strict=True):
            torch.testing.assert_close(torch.tensor(got), expected.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("fully_shard", "DeviceError: torch's DeviceMesh.*xla_amp.shard"),
        ("distribute_tensor", "DeviceError: torch's DeviceMesh.*xla_amp.shard"),
        ("FSDP", "DeviceError: .*FullyShardedDataParallel.*xla_amp.shard"),
        ("FSDP of the CPU", "DeviceError: .*FullyShardedDataParallel.*xla_amp.shard"),
        ("find_unused_parameters", "DeviceError: .*xla_model.reduce_gradients"),
        ("device_ids", r"DeviceError: .*device_ids=\[5\].*leave device_ids out"),
    ],
)
def test_what_does_not_work_is_refused(found, call, said):
    for process in found:
        text = process["refusals"][call]
        assert re.search(said, text, re.DOTALL), text
        assert process["refusals"]["loaded"] == [3.0, 3.0]


@pytest.mark.parametrize(
    ("ranks", "world", "groups"),
    [
        ((2, 3), 4, ((0, 1), (2, 3))),
        ((1, 3), 4, ((0, 2), (1, 3))),
        ((1, 4, 7), 9, ((0, 3, 6), (1, 4, 7), (2, 5, 8))),
        ((0, 3), 4, None),
        ((1, 2), 4, None),
        ((0, 1, 3), 6, None),
        ((1, 0), 2, None),
    ],
)
def test_a_group_is_a_row_or_a_column_of_the_processes(ranks, world, groups):
    assert process_groups.rows_or_columns(ranks, world) == groups


WAITING = """
import sys, time
from datetime import timedelta
import torch.distributed as dist

backend, *timeout = sys.argv[1:]
begin = time.monotonic()
try:
    dist.init_process_group(backend, **{"timeout": timedelta(seconds=int(each)) for each in timeout})
except dist.DistStoreError as error:
    print(int(time.monotonic() - begin), error)
assert dist.distributed_c10d._get_default_timeout("gloo") == dist.constants.default_pg_timeout
"""


@pytest.mark.parametrize(
    ("ours", "arguments"),
    [
        ("3", ("xla_amp",)),
        pytest.param("3", ("cpu:gloo,jax:xla_amp",), marks=pytest.mark.full),
        pytest.param("60", ("xla_amp", "3"), marks=pytest.mark.full),
    ],
)
def test_init_process_group_ends_when_a_process_does_not_start(ours, arguments):
    """Without a timeout in the call it is ours; torch counts those that came."""
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = forked.run(*arguments, program=WAITING, timeout=50, XLA_AMP_TIMEOUT=ours, **place)
    waited, words = done.stdout.split(maxsplit=1)
    assert 3 <= int(waited) < 30
    assert "1/2 clients joined" in words


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x: dist.gather(x, [torch.empty_like(x)]), "torch.distributed.gather .*use all_gather"),
        (lambda x: dist.scatter(x, [x]), "torch.distributed.scatter .*use broadcast"),
        (lambda x: dist.reduce(x, 0), "torch.distributed.reduce .*use all_reduce"),
        (lambda x: dist.all_reduce(x, dist.ReduceOp.BXOR), "op=BXOR.*expected one of SUM, AVG"),
        (lambda x: dist.all_to_all([x, x], [x, x[:2]]), "expected tensors of one shape"),
        (lambda x: dist.all_to_all_single(x, x, [1, 3], [1, 3]), r"splits \[1, 3\] of the input"),
    ],
)
def test_other_collectives_are_refused(group, call, said):
    with pytest.raises(DeviceError, match=said):
        call(torch.ones(4, device=xla_amp.xla_device()))


def test_a_group_of_other_processes_is_refused(group, monkeypatch):
    monkeypatch.setattr(process_groups.cluster, "place", lambda: Process(0, 2, 0, "127.0.0.1:1", 9, None))
    with pytest.raises(DeviceError, match=r"the group has 1 processes.*among all 2"):
        dist.all_reduce(torch.ones(4, device=xla_amp.xla_device()))


def test_a_cpu_tensor_goes_where_it_always_went(group):
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [1] * 4


def test_every_operation_that_sends_tensors_has_a_kernel():
    """torch's list, which grows with its versions."""
    library = "c10d"
    sends = {
        name.removeprefix(f"{library}::").partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith(f"{library}::") and "Tensor" in str(torch._C._get_schema(name.partition(".")[0], ""))
    }
    assert sends - set(c10d.KERNELS) <= {"check_for_nan"}
    assert len(sends) > 10
