"""The transformers models that the lazy device is held against: configuration classes, tiny sizes, random weights.

A row is a model class, its configuration, a batch and where that differs from the rest. Sizes are two layers of width
32 over sequences of 12 tokens (images of 32 pixels), every dropout is off, so that two devices can be compared, and the
batch has what a tokenizer gives: token ids, a padding mask, labels.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # configurations only; nothing is ever fetched

VOCABULARY, BATCH, LENGTH, PIXELS = 64, 2, 12, 32

Batch = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A model to train.

    Args:
        name: how reports call it.
        model: class in transformers.
        config: configuration class in transformers.
        sizes: arguments of the configuration.
        batch: makes the inputs (CPU tensors); the model returns its loss from them.
    """

    name: str
    model: str
    config: str
    sizes: dict[str, Any]
    batch: Callable[[], Batch]

    def build(self) -> torch.nn.Module:
        """The model in training mode, on the CPU, with weights from torch's random state."""
        import transformers

        return getattr(transformers, self.model)(getattr(transformers, self.config)(**self.sizes)).train()


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
DECODER = {
    **SPECIAL,
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "attention_dropout": 0.0,
}
ENCODER = {
    **SPECIAL,
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
VISION = {
    "image_size": PIXELS,
    "patch_size": 8,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
CLIP_TEXT = {**SPECIAL, "eos_token_id": VOCABULARY - 1, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH}
CLASSES = {"num_labels": 4}

ROWS = (
    Row(
        name="GPT-2",
        model="GPT2LMHeadModel",
        config="GPT2Config",
        sizes={
            **SPECIAL,
            "vocab_size": VOCABULARY,
            "n_positions": 32,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
        batch=text,
    ),
    Row(name="Llama", model="LlamaForCausalLM", config="LlamaConfig", sizes=DECODER, batch=text),
    Row(
        name="Mistral",
        model="MistralForCausalLM",
        config="MistralConfig",
        sizes={**DECODER, "sliding_window": 6},
        batch=text,
    ),
    Row(name="Qwen2", model="Qwen2ForCausalLM", config="Qwen2Config", sizes=DECODER, batch=text),
    Row(name="Gemma", model="GemmaForCausalLM", config="GemmaConfig", sizes={**DECODER, "head_dim": 8}, batch=text),
    Row(name="BERT", model="BertForMaskedLM", config="BertConfig", sizes=ENCODER, batch=text),
    Row(name="RoBERTa", model="RobertaForMaskedLM", config="RobertaConfig", sizes=ENCODER, batch=text),
    Row(
        name="DeBERTa-v2",
        model="DebertaV2ForMaskedLM",
        config="DebertaV2Config",
        sizes={
            **ENCODER,
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_buckets": 8,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "position_biased_input": False,
            "pooler_dropout": 0.0,
        },
        batch=text,
    ),
    Row(
        name="T5",
        model="T5ForConditionalGeneration",
        config="T5Config",
        sizes={
            **SPECIAL,
            "decoder_start_token_id": 0,
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
            "dropout_rate": 0.0,
        },
        batch=translation,
    ),
    Row(
        name="BART",
        model="BartForConditionalGeneration",
        config="BartConfig",
        sizes={
            **SPECIAL,
            "decoder_start_token_id": 2,
            "forced_eos_token_id": None,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 32,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "dropout": 0.0,
        },
        batch=translation,
    ),
    Row(
        name="ViT",
        model="ViTForImageClassification",
        config="ViTConfig",
        sizes={**VISION, **CLASSES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        batch=images,
    ),
    Row(
        name="Swin",
        model="SwinForImageClassification",
        config="SwinConfig",
        sizes={
            **CLASSES,
            "image_size": PIXELS,
            "patch_size": 4,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
            "drop_path_rate": 0.0,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
        batch=images,
    ),
    Row(
        name="ConvNeXt",
        model="ConvNextForImageClassification",
        config="ConvNextConfig",
        sizes={**CLASSES, "depths": [1, 2], "hidden_sizes": [16, 32], "num_stages": 2, "drop_path_rate": 0.0},
        batch=images,
    ),
    Row(
        name="ResNet",
        model="ResNetForImageClassification",
        config="ResNetConfig",
        sizes={**CLASSES, "embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 2], "layer_type": "bottleneck"},
        batch=images,
    ),
    Row(
        name="CLIP",
        model="CLIPModel",
        config="CLIPConfig",
        sizes={
            "projection_dim": 16,
            "text_config": {**VISION, **CLIP_TEXT},
            "vision_config": VISION,
        },
        batch=captions,
    ),
    Row(
        name="Whisper",
        model="WhisperForConditionalGeneration",
        config="WhisperConfig",
        sizes={
            **SPECIAL,
            "decoder_start_token_id": 1,
            "vocab_size": VOCABULARY,
            "num_mel_bins": 80,
            "max_source_positions": 32,
            "max_target_positions": 32,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "dropout": 0.0,
        },
        batch=speech,
    ),
    Row(
        name="Mamba",
        model="MambaForCausalLM",
        config="MambaConfig",
        sizes={**SPECIAL, "vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2},
        batch=text,
    ),
    Row(
        name="Mixtral",
        model="MixtralForCausalLM",
        config="MixtralConfig",
        sizes={**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
        batch=text,
    ),
)
