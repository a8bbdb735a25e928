"""Checks of arrays that users pass in; errors name the first bad entry."""

import numpy as np

from stagecert.errors import ProblemError

# Beyond this, sums and products of entries could overflow.
LARGEST = 1e100


def numbers(name: str, values) -> np.ndarray:
    """The values as a float64 array of finite numbers."""
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise ProblemError(f"{name} is not an array: {error}") from error
    if not (np.issubdtype(array.dtype, np.number) or array.dtype == bool) or np.iscomplexobj(array):
        raise ProblemError(f"{name} must hold real numbers, not {array.dtype}.")
    array = array.astype(float)
    reject(~np.isfinite(array), name, array, "it must be finite")
    reject(np.abs(array) > LARGEST, name, array, f"numbers beyond {LARGEST:g} overflow; scale them")
    return array


def reject(wrong: np.ndarray, name: str, array: np.ndarray, what: str) -> None:
    """Raises if anything is wrong, naming the first such entry."""
    if wrong.any():
        at = tuple(np.argwhere(wrong)[0].tolist())
        where = "[" + ", ".join(map(str, at)) + "]" if at else ""
        raise ProblemError(f"{name}{where} = {array[at]}: {what}.")


def whole(name: str, value, least: int = 1) -> int:
    """The value as an integer that is not below `least`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ProblemError(f"{name} = {value!r}: it must be an integer of at least {least}.")
    return int(value)


def discounting(value) -> float:
    """The value as a discount."""
    value = amount("discount", value)
    if not 0 < value <= 1:
        raise ProblemError(f"discount = {value!r}: it must be above 0 and at most 1.")
    return value


def amount(name: str, value) -> float:
    """The value as a finite number that is not negative."""
    number = isinstance(value, int | float | np.integer | np.floating)
    if not number or isinstance(value, bool) or not 0 <= value < np.inf:
        raise ProblemError(f"{name} = {value!r}: it must be a finite number, not negative.")
    return float(value)
