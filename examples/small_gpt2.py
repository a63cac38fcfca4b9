"""The model and the data of the examples that train a small GPT-2 of transformers on bytes."""

from __future__ import annotations

import torch
import transformers

HEAD = 32
"""Channels of an attention head."""


def build(context: int, layers: int, width: int) -> transformers.GPT2LMHeadModel:
    """GPT-2 over bytes, with random weights."""
    config = transformers.GPT2Config(
        vocab_size=256,
        n_positions=context,
        n_embd=width,
        n_layer=layers,
        n_head=width // HEAD,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def pieces(text: bytes, context: int) -> list[dict[str, torch.Tensor]]:
    """Pieces of a text, each `context` bytes, that do not overlap, as a Trainer reads them."""
    count = len(text) // context
    rows = torch.frombuffer(bytearray(text[: count * context]), dtype=torch.uint8).view(count, context).long()
    return [{"input_ids": row, "labels": row} for row in rows]
