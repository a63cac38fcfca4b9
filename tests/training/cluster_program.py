"""Processes of jobs: ``cluster_program.py FOLDER STARTED``; what each sees of the others, and where it listens.

STARTED is JSON: for each process its mode, its variables, and for the mode "initialized" what JAX is told.  All run at
a time, as copies of this one.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import jax
import numpy as np
import torch

import xla_amp
from xla_amp import xla_model as xm

LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}
"""127.0.0.1 as the kernel writes it, also as an IPv6 address."""


def listening():
    """Addresses (as the kernel writes them) of this process's sockets that wait for connections."""
    links = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _is_open(name)]
    inodes = {link[8:-1] for link in links if link.startswith("socket:")}
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return sorted({row[1].rpartition(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes})


def _is_open(name):
    return os.path.lexists(f"/proc/self/fd/{name}")


def main(result):
    before = xm.xrt_world_size(), xm.get_ordinal()
    device = xla_amp.xla_device()
    mine = xm.get_ordinal()
    reduced = xm.all_reduce(xm.REDUCE_SUM, torch.tensor([mine + 1.0], device=device)).item()
    sums = xm.mesh_reduce("sums", {"loss": np.float32(mine), "count": torch.tensor([mine])}, list)
    try:
        xm.mesh_reduce("object", Path.exists, list)
    except TypeError as error:
        refused = str(error)
    found = {
        "before": before,
        "place": [xm.xrt_world_size(), mine, xm.get_local_ordinal()],
        "reduced": reduced,
        "mesh": xla_amp.make_mesh().size,
        "sums": [float(part["loss"]) + part["count"].item() for part in sums],
        "refused": refused,
        "listening": listening(),
    }
    Path(f"{result}-{mine}").write_text(json.dumps(found))
    xm.rendezvous("end")


def start(result, variables, address=None, rank=0):
    os.environ |= variables
    if address is not None:
        jax.distributed.initialize(address, 2, rank, initialization_timeout=60)
    main(result)


if __name__ == "__main__":
    folder, children = sys.argv[1], []
    for mode, variables, told in json.loads(sys.argv[2]):
        child = os.fork()
        if not child:
            start(f"{folder}/{mode}", variables, *told)
            break
        children.append(child)
    else:
        sys.exit(sum(os.waitpid(child, 0)[1] != 0 for child in children))
