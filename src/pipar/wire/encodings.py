"""The names of the encodings of activations and gradients.

Exact ones give back the same bits: `sparse` leaves out zeros, `planes` entropy-codes the exponents. Lossy ones are
never chosen by themselves.
"""

from __future__ import annotations

EXACT = ("raw", "sparse", "planes", "sparse-planes")
LOSSY = ("fp16", "bf16", "int8", "topk")
ALL = (*EXACT, *LOSSY)
#: Those that a tensor is coded by, chunk by chunk.
CODED = ALL[1:]

_DENSE = {"sparse": "raw", "sparse-planes": "planes"}


def is_sparse(encoding: str) -> bool:
    """Return whether only those entries travel that are not zero: behind a ReLU, and nowhere else, that is exact."""
    return encoding in _DENSE


def dense(encoding: str) -> str:
    """Return what stands for an encoding at a cut that has no exact zeros."""
    return _DENSE.get(encoding, encoding)
