"""Which job a process belongs to: variables of launchers, simulated, and an initialized jax.distributed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import forked
import pytest
from cluster_program import LOOPBACK

from xla_amp.common.config import Process, Store
from xla_amp.errors import EngineError
from xla_amp.lazy.base import private_api
from xla_amp.lazy.processes import cluster
from xla_amp.lazy.processes.launch import _two_ports

PREFIXES = ("SLURM_", "OMPI_", "PMI_", "TPU_", "MEGASCALE_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "JAX_CO")
PROGRAM = Path(__file__).with_name("cluster_program.py")
SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_NODELIST": "node[003-004]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}
TORCHRUN = {"WORLD_SIZE": "8", "RANK": "5", "LOCAL_RANK": "1", "MASTER_ADDR": "node3", "MASTER_PORT": "100"}
TPU_POD = {"TPU_WORKER_HOSTNAMES": "localhost,other,third", "TPU_WORKER_ID": "2", "TPU_SKIP_MDS_QUERY": "1"}
TPU_POD |= {"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1", "MEGASCALE_COORDINATOR_ADDRESS": "localhost:9"}


def placed(monkeypatch, variables, *, tpu=False):
    """What `cluster.place` says where these variables are set."""
    for name in list(os.environ):
        if name.startswith(PREFIXES):
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    from jax._src.clusters import cloud_tpu_cluster

    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", tpu)
    cluster._of_cluster.cache_clear()
    try:
        return cluster.place()
    finally:
        cluster._of_cluster.cache_clear()


def test_launchers(monkeypatch):
    assert placed(monkeypatch, {}) is None
    assert placed(monkeypatch, SLURM) == Process(3, 4, 1, "node003:61441", 300, None)
    assert placed(monkeypatch, {**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) is None
    assert placed(monkeypatch, OPEN_MPI) == Process(1, 2, 0, "10.96.0.1:62624", 300, None)
    assert placed(monkeypatch, TPU_POD, tpu=True) == Process(5, 6, 5, "localhost:8482", 300, None)
    chosen = placed(monkeypatch, {**SLURM, "XLA_AMP_TIMEOUT": "9", "JAX_COORDINATOR_PORT": "77"})
    assert chosen == Process(3, 4, 1, "node003:77", 9, None)


def test_what_stands_closer_to_the_process_wins(monkeypatch):
    """torchrun as a task of Slurm: Slurm counts machines then; and a process that was asked to be alone."""
    expected = Process(5, 8, 1, "node3:101", 300, Store("node3", 100, False, "0"))
    assert placed(monkeypatch, {**SLURM, **TORCHRUN}) == expected
    assert placed(monkeypatch, {**SLURM, "WORLD_SIZE": "1"}) is None
    assert placed(monkeypatch, {**SLURM, **TORCHRUN, "XLA_AMP_ALONE": "1"}) is None
    monkeypatch.delenv("XLA_AMP_ALONE")
    monkeypatch.setattr(private_api, "joined", lambda: ("here:5", 4, 3))
    assert placed(monkeypatch, SLURM) == Process(3, 4, 1, "here:5", 300, None)
    with pytest.raises(EngineError, match=r"process 3 of 4, RANK and WORLD_SIZE that it is process 5 of 8; leave"):
        placed(monkeypatch, TORCHRUN)
    monkeypatch.setattr(private_api, "joined", lambda: ("here:5", 1, 0))
    assert placed(monkeypatch, SLURM) is None


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({name: OPEN_MPI[name] for name in OPEN_MPI if "orte" not in name}, "Open MPI (says .* 1 of 2|5 or newer)"),
        ({name: SLURM[name] for name in SLURM if "STEP" not in name}, "Slurm says that this is task 3 of 4"),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "MPI says that this is task 0 of 2"),
        ({**SLURM, "SLURM_NTASKS": "4(x2)"}, "JAX could not read where this process is"),
    ],
)
def test_a_task_of_several_does_not_train_alone(monkeypatch, variables, words):
    with pytest.raises(EngineError, match=words) as raised:
        placed(monkeypatch, variables)
    assert "XLA_AMP_ALONE=1 makes each task train alone" in str(raised.value)
    assert placed(monkeypatch, {**variables, "XLA_AMP_ALONE": "1"}) is None


@pytest.mark.full
@pytest.mark.processes
def test_processes_find_each_other_and_agree(tmp_path):
    address = f"127.0.0.1:{_two_ports()}"
    job = {**SLURM, "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NTASKS": "2", "JAX_COORDINATOR_PORT": str(_two_ports())}
    started = [["initialized", {}, [address, rank]] for rank in range(2)]
    started += [["slurm", {**job, "SLURM_PROCID": rank, "SLURM_LOCALID": rank}, []] for rank in "01"]
    forked.run(PROGRAM, tmp_path, json.dumps(started), XLA_AMP_TIMEOUT="60", OMP_NUM_THREADS="1")
    for mode in ("initialized", "slurm"):
        for rank in range(2):
            found = json.loads((tmp_path / f"{mode}-{rank}").read_text())
            assert found["before"] == [2, rank], mode
            assert found["place"] == [2, rank, rank], mode
            assert found["reduced"] == 3.0
            assert found["mesh"] == 2
            assert found["sums"] == [0.0, 2.0]
            assert found["refused"].startswith(
                "mesh_reduce('object'): builtins.getattr, pathlib.Path could not be read again: expected"
            )
            if mode != "initialized":  # there the program chose where JAX listens
                assert set(found["listening"]) <= LOOPBACK, mode
