"""Scripts for torch.distributed: what works with the lazy device, and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import xla_amp
from xla_amp.common.config import Process
from xla_amp.errors import DeviceError
from xla_amp.lazy.distributed import process_groups
from xla_amp.lazy.torch_integration import c10d


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


@pytest.mark.processes
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
