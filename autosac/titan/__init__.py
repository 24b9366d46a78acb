"""What a TorchTitan job's settings say, without capturing it."""
