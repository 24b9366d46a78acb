"""A TorchTitan job on the CPU that plans again after its first steps."""
