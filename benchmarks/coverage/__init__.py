"""What is covered: every parallel dimension, model and setting of TorchTitan, run one by one."""
