"""Recomputing a module's activations: the tape of its forward, and what is made again from it in the backward."""
