"""Checking many CRC-32 at once.

CRC-32 is linear: the checksum of blobs laid end to end follows from the checksums of the blobs. So one
call of zlib over the joined bytes checks them all, where a call for each of millions of small arrays
would take longer than reading them.
"""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

U32 = npt.NDArray[np.uint32]


def all_match(joined: bytes, num_blobs: int, crcs: npt.NDArray[Any], seeds: npt.ArrayLike) -> bool:
    """Whether `crcs[i]` is zlib.crc32(blob i, seeds[i]) for every blob; `joined` are blobs of one length.

    >>> blobs = [b"spam", b"eggs", b"ham!"]
    >>> crcs = np.array([zlib.crc32(b, s) for b, s in zip(blobs, [7, 8, 9])])
    >>> all_match(b"".join(blobs), 3, crcs, [7, 8, 9]), all_match(b"spamEggsham!", 3, crcs, [7, 8, 9])
    (True, False)
    """
    length = len(joined) // num_blobs
    operator = _shift(length, 0)
    # crc32(b, seed) = crc32(b) ^ shift(seed): the checksums as they would be without seeds.
    plain = crcs.astype(np.uint32) ^ _apply(operator, np.asarray(seeds, np.uint32))
    level = 0
    while len(plain) > 1:  # crc32(a + b) = shift(crc32(a)) ^ crc32(b), pair by pair
        if len(plain) % 2:
            plain = np.concatenate([np.zeros(1, np.uint32), plain])
        plain = _apply(_shift(length, level), plain[0::2]) ^ plain[1::2]
        level += 1
    return zlib.crc32(joined) == int(plain[0])


@lru_cache(maxsize=512)
def _shift(length: int, level: int) -> U32:
    """What length * 2^level zero bytes do to a checksum: a linear map, as a table [4, 256] over its bytes."""
    bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
    if level == 0:
        zeros = bytes(length)
        image = np.array([zlib.crc32(zeros, int(b)) ^ zlib.crc32(zeros) for b in bits], np.uint32)
    else:
        half = _shift(length, level - 1)
        image = _apply(half, _apply(half, bits))
    table = np.zeros((4, 256), np.uint32)
    for byte in range(4):
        for bit in range(8):
            table[byte, 1 << bit : 2 << bit] = table[byte, : 1 << bit] ^ image[8 * byte + bit]
    return table


def _apply(table: U32, x: U32) -> U32:
    out: U32 = table[0, x & 255] ^ table[1, x >> 8 & 255] ^ table[2, x >> 16 & 255] ^ table[3, x >> 24]
    return out
