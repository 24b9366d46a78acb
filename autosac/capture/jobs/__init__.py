"""What is captured: TorchTitan jobs of both versions, and any eager training step."""
