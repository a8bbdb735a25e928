"""Arrays of pixels as PNG files, written without any other package."""

import struct
import zlib

import numpy as np

SIGNATURE = b"\x89PNG\r\n\x1a\n"
GREY, COLOUR = 0, 2


def png(pixels: np.ndarray) -> bytes:
    """A PNG file.

    Args:
        pixels: (height, width) or (height, width, 3), from 0 (black) to 1; what is outside of that
            is cut.
    """
    levels = np.round(np.clip(np.asarray(pixels, float), 0, 1) * 255).astype(np.uint8)
    height, width = levels.shape[:2]
    kind = GREY if levels.ndim == 2 else COLOUR
    # Each line begins with a byte that says how it is predicted from its neighbours: not at all.
    lines = np.concatenate(
        [np.zeros((height, 1), np.uint8), levels.reshape(height, -1)], axis=1
    ).tobytes()
    header = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    return (
        SIGNATURE
        + _chunk(b"IHDR", header)
        + _chunk(b"IDAT", zlib.compress(lines, 9))
        + _chunk(b"IEND", b"")
    )


def _chunk(name: bytes, content: bytes) -> bytes:
    return (
        struct.pack(">I", len(content))
        + name
        + content
        + struct.pack(">I", zlib.crc32(name + content))
    )
