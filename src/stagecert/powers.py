"""Sizes of batches: powers of two, so that few programs are ever compiled."""


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
