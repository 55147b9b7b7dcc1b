"""Ringfetch's self-describing data, written down a second time: bytes as a function of (seed, offset).

The stream is little-endian 64-bit words; word i is SplitMix64's output function of seed + (i + 1) x 0x9E3779B97F4A7C15
(Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014). See crates/pattern/src/lib.rs.
"""

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def words(seed: int, numbers) -> np.ndarray:
    """The stream's words of these numbers, as uint64."""
    with np.errstate(over="ignore"):
        z = np.uint64(seed) + (np.asarray(numbers, dtype=np.uint64) + np.uint64(1)) * GOLDEN
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def stream(seed: int, offset: int, length: int) -> bytes:
    """`length` bytes of the stream from `offset`."""
    # Bytes 10..20 are the last 6 of word 1 and the first 4 of word 2: words 1..3 as bytes 8..24, cut to 2..12.
    first, last = offset // 8, (offset + length + 7) // 8
    data = words(seed, np.arange(first, last, dtype=np.uint64)).astype("<u8").tobytes()
    return data[offset - first * 8 :][:length]


def f32(seed: int, first_element: int, count: int) -> np.ndarray:
    """`count` f32 elements from number `first_element` on: the top 24 bits of each word, mapped to [-1, 1)."""
    numbers = np.arange(first_element, first_element + count, dtype=np.uint64)
    top = (words(seed, numbers) >> np.uint64(40)).astype(np.float32)
    # 24 bits fit a float32's mantissa, and the division and subtraction are exact.
    return top / np.float32(8388608.0) - np.float32(1.0)
