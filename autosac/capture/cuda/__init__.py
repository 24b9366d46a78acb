"""CUDA without CUDA: the simulated accelerator under PyTorch's own name for it, for scripts that are not written for it.

A small library (shim.cpp) makes ``cuda`` a device that PyTorch can name; `functions` answers what `torch.cuda` asks of C++.
"""
