"""The simulated accelerator: a device without hardware, its dispatch mode, its values, and the kernels CUDA would choose."""
