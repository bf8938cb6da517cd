"""Random numbers by purpose and key, not from a shared stream.

The same (seed, purpose, key) gives the same numbers in any process and in any order. So data order, augmentation and
noise do not depend on the method, the split, the threads or the order in which devices arrive.
"""

from __future__ import annotations

import hashlib
import operator

import numpy as np


def generator(seed: int, purpose: str, *key: str | int) -> np.random.Generator:
    """Return a fresh generator for this key: equal arguments give equal numbers on every machine.

    The generator is numpy's Philox, whose 128-bit key is the BLAKE2b digest of the arguments. Strings and integers
    differ (device 1 is not device "1"), and so do keys whose parts are divided differently.
    """
    digest = hashlib.blake2b(b"".join(map(_encoded, (seed, purpose, *key))), digest_size=16)
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest.digest(), "little")))


def _encoded(part: str | int) -> bytes:
    """Return type, length and text of one part, so that no two different keys have the same bytes."""
    tag, text = ("s", part) if isinstance(part, str) else ("i", str(operator.index(part)))
    body = text.encode()
    return f"{tag}{len(body)}:".encode() + body
