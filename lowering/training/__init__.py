"""Fused optimizer steps and fake quantization."""
