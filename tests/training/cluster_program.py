"""One process of a job: cluster_program.py MODE RESULT; what it sees of the others, and where it listens."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

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


def main(rank, mode, result):
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


if __name__ == "__main__":
    mode, result = sys.argv[1:3]
    if mode == "initialized":
        import jax

        jax.distributed.initialize(sys.argv[3], 2, int(sys.argv[4]), initialization_timeout=60)
        main(int(sys.argv[4]), mode, result)
    else:
        main(0, mode, result)
