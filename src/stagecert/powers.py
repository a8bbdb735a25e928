"""Sizes of batches of which there are few, so that few programs are ever compiled."""


def power_below(size: int) -> int:
    """The largest power of two that is at most `size`; one if there is none.

    >>> [power_below(n) for n in (0, 1, 7, 8)]
    [1, 1, 4, 8]
    """
    return 1 << max(size, 1).bit_length() - 1


def power_above(size: int) -> int:
    """The smallest power of two that is at least `size`.

    >>> [power_above(n) for n in (0, 1, 5, 8)]
    [1, 1, 8, 8]
    """
    return 1 << (max(size, 1) - 1).bit_length()


def few_counts(count: int) -> int:
    """A number of boxes, no smaller, of which there are few.

    Two an octave, as long as boxes cost less than compiling; eight where they may cost more.

    >>> [few_counts(n) for n in (1, 3, 5, 7, 33)]
    [1, 3, 6, 8, 36]
    """
    step = max(power_below(count) // (2 if count <= 32 else 8), 1)
    return -(-count // step) * step
