"""Loss scaling and optimizers whose steps can be skipped on the device."""
