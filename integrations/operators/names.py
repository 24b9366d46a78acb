"""What the name of an operator says. Imports nothing heavy."""

from __future__ import annotations

# Operators of PyTorch itself. Others are not known to give the same result when they run again with the same arguments.
_KNOWN_NAMESPACES = frozenset(
    {
        "aten",
        "prims",
        "rngprims",
        "c10d",
        "c10d_functional",
        "_c10d_functional",
        "_c10d_functional_autograd",
        "_dtensor",
        "symm_mem",
        "fsdp",
        "higher_order",
        "mkl",
        "mkldnn",
        "onednn",
        "quantized",
        "sparse",
        "inductor",
        "streams",
    }
)


def is_foreign_name(name: str) -> bool:
    """Whether an operator of this name is none of PyTorch's own; higher-order operators, which have no namespace, are."""
    namespace, dot, _ = name.partition(".")
    return bool(dot) and namespace not in _KNOWN_NAMESPACES
