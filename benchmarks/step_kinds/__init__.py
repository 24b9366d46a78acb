"""Kinds of calls in training steps that were profiled on an H100, beside their prices."""
