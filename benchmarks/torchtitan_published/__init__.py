"""TorchTitan's published runs, and the distributed rows of the TorchSim paper, simulated beside their figures."""
