"""A step of a GPT as StableHLO for 16 devices that are not here; test_many_hosts.py compiles it for them.

    python many_hosts_program.py FOLDER

writes ``FOLDER/gpu.mlir``, ``FOLDER/tpu.mlir`` and ``FOLDER/split``: the elements of the parameters that are split.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import target_program  # first: it sets the count of devices
import torch
import transformers

import xla_amp
from xla_amp.lazy.programs import execute

CONFIG = transformers.GPT2Config(
    n_layer=1, n_embd=128, n_head=4, vocab_size=512, n_positions=64, bos_token_id=0, resid_pdrop=0, embd_pdrop=0,
    attn_pdrop=0,
)  # fmt: skip

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    device, mesh = xla_amp.xla_device(), xla_amp.make_mesh({"data": 16})
    model = transformers.GPT2LMHeadModel(CONFIG)
    layout = xla_amp.shard(model, mesh, "fsdp")
    split = sum(math.prod(each.shape) for each in layout.parameters if "data" in each.spec)
    optimizer = xla_amp.syncfree.AdamW(model.parameters())
    tokens = torch.zeros(16, CONFIG.n_positions, dtype=torch.int64).to(device)
    for _ in range(2):
        with xla_amp.autocast(device, dtype=torch.bfloat16, policy="tpu"):
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del loss
        xla_amp.sync()
    for platform in ("gpu", "tpu"):
        text = target_program.text(next(reversed(execute._programs)), platform)
        (folder / f"{platform}.mlir").write_text(text)
    (folder / "split").write_text(str(split))
