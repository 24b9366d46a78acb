"""Traces of PyTorch's profiler (Kineto's JSON): which operator took how long on a real GPU.

`read_profile` streams a file, `attribute` finds the operator behind every kernel, `to_signature` says in the terms of
`autosac.trace.Signature` how it was called, `transfers` matches the collectives of several ranks.
"""

from autosac.kineto.attribution import Attribution, OperatorCall, attribute
from autosac.kineto.collectives import TransferTimes, transfers
from autosac.kineto.reader import HostEvent, Kernel, Profile, read_profile
from autosac.kineto.signatures import Unreadable, is_vocabulary, to_signature

__all__ = [
    "Attribution",
    "HostEvent",
    "Kernel",
    "OperatorCall",
    "Profile",
    "TransferTimes",
    "Unreadable",
    "attribute",
    "is_vocabulary",
    "read_profile",
    "to_signature",
    "transfers",
]
