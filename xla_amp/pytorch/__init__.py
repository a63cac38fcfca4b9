"""The PyTorch front: regions, loss scaling, data on the device, the functions of torch_xla."""
