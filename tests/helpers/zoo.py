"""The transformers models that the lazy device is held against: configuration classes, tiny sizes, random weights.

A row is a model class, its configuration, a batch and where that differs from the rest. Sizes are two layers of width
32 over sequences of 12 tokens (images of 32 pixels), every dropout is off, so that two devices can be compared, and the
batch has what a tokenizer gives: token ids, a padding mask, labels.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # configurations only; nothing is ever fetched

VOCABULARY, BATCH, LENGTH, PIXELS = 64, 2, 12, 32

Batch = dict[str, torch.Tensor]


class Row(NamedTuple):
    """A model to train: a class and a configuration class of transformers, which begin with the same word."""

    name: str
    """How reports call it."""
    family: str
    """What the names of its classes begin with."""
    head: str
    """The rest of the model's name."""
    sizes: dict[str, Any]
    """Arguments of the configuration."""
    batch: Callable[[], Batch]
    """Makes the inputs (CPU tensors); the model returns its loss from them."""

    def build(self) -> torch.nn.Module:
        """The model in training mode, on the CPU, with weights from torch's random state."""
        import transformers

        config = getattr(transformers, f"{self.family}Config")(**self.sizes)
        return getattr(transformers, self.family + self.head)(config).train()


def _tokens(length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, length))


def _padding() -> torch.Tensor:
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    mask[-1, LENGTH - 3 :] = 0
    return mask


def text() -> Batch:
    """Token ids i64[2, 12], a padding mask whose last sequence is three tokens short, labels ignored there."""
    tokens, mask = _tokens(), _padding()
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def translation() -> Batch:
    """Source tokens with their mask, target tokens as labels."""
    return {"input_ids": _tokens(), "attention_mask": _padding(), "labels": _tokens(8)}


def images() -> Batch:
    """Images f32[2, 3, 32, 32] and labels."""
    return {"pixel_values": torch.randn(BATCH, 3, PIXELS, PIXELS), "labels": torch.randint(4, (BATCH,))}


def captions() -> Batch:
    """Images with captions, whose last token is the end-of-text token that CLIP pools at."""
    tokens = _tokens()
    tokens[:, -1] = VOCABULARY - 1
    return {
        "pixel_values": torch.randn(BATCH, 3, PIXELS, PIXELS),
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "return_loss": True,  # type: ignore[dict-item]
    }


def speech() -> Batch:
    """Log-mel features f32[2, 80, 64] and target tokens."""
    return {"input_features": torch.randn(BATCH, 80, 64), "labels": _tokens(8)}


SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT = dict(SPECIAL, vocab_size=VOCABULARY)
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = dict(TEXT, **SHAPE, num_key_value_heads=2, max_position_embeddings=32, attention_dropout=0.0)
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ENCODER = dict(TEXT, **SHAPE, **NO_DROPOUT, max_position_embeddings=32)
VISION = dict(SHAPE, image_size=PIXELS, patch_size=8)
CLIP_TEXT = dict(TEXT, eos_token_id=VOCABULARY - 1, max_position_embeddings=LENGTH)
CLASSES = {"num_labels": 4}
PAIR = dict(
    TEXT,
    d_model=32,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=64,
    decoder_ffn_dim=64,
    dropout=0.0,
)
"""Encoder and decoder."""
GPT2 = dict(TEXT, n_positions=32, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
DEBERTA = dict(
    ENCODER,
    relative_attention=True,
    pos_att_type=["p2c", "c2p"],
    position_buckets=8,
    norm_rel_ebd="layer_norm",
    share_att_key=True,
    position_biased_input=False,
    pooler_dropout=0.0,
)
T5 = dict(TEXT, decoder_start_token_id=0, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0)
BART = dict(PAIR, decoder_start_token_id=2, forced_eos_token_id=None, max_position_embeddings=32)
SWIN = dict(CLASSES, **NO_DROPOUT, image_size=PIXELS, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4])
CONVNEXT = dict(CLASSES, depths=[1, 2], hidden_sizes=[16, 32], num_stages=2, drop_path_rate=0.0)
RESNET = dict(CLASSES, embedding_size=16, hidden_sizes=[16, 32], depths=[1, 2], layer_type="bottleneck")
CLIP = {"projection_dim": 16, "text_config": {**VISION, **CLIP_TEXT}, "vision_config": VISION}
WHISPER = dict(PAIR, decoder_start_token_id=1, num_mel_bins=80, max_source_positions=32, max_target_positions=32)
MAMBA = dict(TEXT, hidden_size=32, state_size=8, num_hidden_layers=2)
MIXTRAL = dict(DECODER, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)

ROWS = (
    Row("GPT-2", "GPT2", "LMHeadModel", GPT2, text),
    Row("Llama", "Llama", "ForCausalLM", DECODER, text),
    Row("Mistral", "Mistral", "ForCausalLM", dict(DECODER, sliding_window=6), text),
    Row("Qwen2", "Qwen2", "ForCausalLM", DECODER, text),
    Row("Gemma", "Gemma", "ForCausalLM", dict(DECODER, head_dim=8), text),
    Row("BERT", "Bert", "ForMaskedLM", ENCODER, text),
    Row("RoBERTa", "Roberta", "ForMaskedLM", ENCODER, text),
    Row("DeBERTa-v2", "DebertaV2", "ForMaskedLM", DEBERTA, text),
    Row("T5", "T5", "ForConditionalGeneration", T5, translation),
    Row("BART", "Bart", "ForConditionalGeneration", BART, translation),
    Row("ViT", "ViT", "ForImageClassification", dict(VISION, **CLASSES, **NO_DROPOUT), images),
    Row("Swin", "Swin", "ForImageClassification", dict(SWIN, window_size=4, drop_path_rate=0.0), images),
    Row("ConvNeXt", "ConvNext", "ForImageClassification", CONVNEXT, images),
    Row("ResNet", "ResNet", "ForImageClassification", RESNET, images),
    Row("CLIP", "CLIP", "Model", CLIP, captions),
    Row("Whisper", "Whisper", "ForConditionalGeneration", WHISPER, speech),
    Row("Mamba", "Mamba", "ForCausalLM", MAMBA, text),
    Row("Mixtral", "Mixtral", "ForCausalLM", MIXTRAL, text),
)
