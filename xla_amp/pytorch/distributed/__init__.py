"""The functions of torch_xla's xla_model."""
