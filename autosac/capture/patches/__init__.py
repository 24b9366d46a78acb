"""What is changed in PyTorch while a capture runs."""
