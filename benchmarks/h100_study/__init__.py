"""The H100 single-GPU study: 44 plain PyTorch training steps, simulated and set beside what a real H100 measured."""
