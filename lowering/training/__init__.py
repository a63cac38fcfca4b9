"""Loss scaling and fused optimizer steps."""
