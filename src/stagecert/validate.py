"""Bad input becomes one clear exception before any work."""

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stagecert.errors import ProblemError
from stagecert.problem import AbstractStage, Constraint, Problem, ScanStage, as_arrays
from stagecert.reformulation import Point
from stagecert.sets import AbstractSet


class _Earlier(tuple):
    """The earlier blocks, which say so when a stage asks for a later one."""

    where: str

    def __getitem__(self, index):
        if isinstance(index, int) and not -len(self) <= index < len(self):
            have = f"only blocks 0 to {len(self) - 1} come" if len(self) else "no block comes"
            raise ProblemError(
                f"{self.where} reads block {index}, but {have} before it. A stage may read "
                "the inputs and earlier blocks only; put the stages in order."
            )
        return super().__getitem__(index)


def _earlier(blocks, where) -> _Earlier:
    guarded = _Earlier(blocks)
    guarded.where = where
    return guarded


jax.tree_util.register_pytree_node(
    _Earlier, lambda b: (tuple(b), b.where), lambda where, blocks: _earlier(blocks, where)
)


def first_bad_entry(array) -> tuple[tuple[int, ...], float] | None:
    """Index and value of the first entry that is not finite."""
    array = np.asarray(array)
    bad = ~np.isfinite(array)
    if not bad.any():
        return None
    index = tuple(int(i) for i in np.argwhere(bad)[0])
    return index, float(array[index])


def _check_finite(tree: Any, what: str) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not isinstance(leaf, (np.ndarray, np.generic, jax.Array, float, complex)):
            continue
        place = f"{what}{jax.tree_util.keystr(path)}"
        array = np.asarray(leaf)
        if array.dtype.kind in "OUSMmV" or array.dtype == np.longdouble != np.float64:
            raise ProblemError(
                f"{place} has dtype {array.dtype}, which JAX cannot use; give numbers, float64 or "
                "float32."
            )
        if np.issubdtype(array.dtype, np.complexfloating):
            raise ProblemError(
                f"{place} is complex ({array.dtype}); stagecert works on real numbers."
            )
        if not (jnp.issubdtype(array.dtype, jnp.floating)):
            continue
        if (found := first_bad_entry(array.astype(np.float64))) is not None:
            index, value = found
            raise ProblemError(f"{place} is not finite: entry {list(index)} is {value}.")


def _call(function, arguments, where: str):
    """eval_shape with errors that say whose function failed."""
    try:
        return jax.eval_shape(lambda *a: function(*a), *arguments)
    except ProblemError:
        raise
    except Exception as error:
        summary = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ProblemError(
            f"{where} failed on inputs of the right shapes: {summary}{advice(error)}"
        ) from error


def advice(error: Exception) -> str:
    """What to do about functions that ask for numbers where JAX traces them."""
    if isinstance(error, jax.errors.TracerArrayConversionError):
        return "\nNumPy's functions need numbers: use those of jax.numpy, jnp.exp for np.exp."
    if isinstance(error, jax.errors.TracerBoolConversionError):
        return (
            "\n`if`, `while`, `and`, `min(a, b)` need to know which case it is: use "
            "jnp.where(condition, a, b), or sc.maximum and sc.minimum."
        )
    if isinstance(
        error, (jax.errors.ConcretizationTypeError, jax.errors.TracerIntegerConversionError)
    ):
        return (
            "\nfloat(), int() and the functions of `math` need numbers: use those of jax.numpy, "
            "jnp.exp for math.exp."
        )
    return ""


def _check_floating(shape, where: str) -> None:
    if not jnp.issubdtype(shape.dtype, jnp.floating):
        raise ProblemError(
            f"{where} returns {shape.dtype}; it must return floating-point numbers (write 0.0, "
            "not 0)."
        )


def validate(problem: Problem) -> None:
    """Raises ProblemError if the problem is not well formed.

    Checks shapes, dtypes, finiteness of all parameters, that the set is bounded and not empty, and
    that no stage reads a later block. Convexity and ordering are for `check`.
    """
    if not isinstance(problem, Problem):
        raise ProblemError(f"Expected a stagecert.Problem, got {type(problem).__name__}.")
    if not isinstance(problem.inputs, AbstractSet):
        raise ProblemError(
            f"inputs must be a set (Box, Ball, Simplex, Product ...), not "
            f"{type(problem.inputs).__name__}."
        )
    for index, stage in enumerate(problem.stages):
        if not isinstance(stage, AbstractStage):
            raise ProblemError(f"Stage {index} must be a Stage or ScanStage, not {stage!r}.")
        where = problem.stage_name(index)
        for what in ("lower", "upper"):
            function = getattr(stage, what, None)
            if function is not None and not callable(function):
                raise ProblemError(f"{where}: {what} must be a function, not {function!r}.")
        _check_finite(getattr(stage, "params", None), f"{where}: params")
    _check_finite(problem.objective.params, "Objective: params")
    for index, constraint in enumerate(problem.constraints):
        where = f"Constraint {index}"
        if not isinstance(constraint, Constraint):
            raise ProblemError(f"{where} must be a Constraint or a function, not {constraint!r}.")
        if not callable(constraint.function):
            raise ProblemError(f"{where} must be a function, not {constraint.function!r}.")
        _check_finite(constraint.params, f"{problem.constraint_name(index)}: params")
    validate_numbers(problem)

    arrays = as_arrays(problem)
    inputs = jax.eval_shape(arrays.inputs.centre)
    blocks: tuple = ()
    for index, stage in enumerate(arrays.stages):
        blocks = (*blocks, _validate_stage(problem, stage, index, inputs, blocks))
    value = _call(
        lambda i, b: jnp.asarray(arrays.objective(i, _earlier(b, "The objective"))),
        (inputs, blocks),
        "The objective",
    )
    if value.shape != ():
        raise ProblemError(
            f"The objective must return a scalar, but returns an array of shape {value.shape}."
        )
    _check_floating(value, "The objective")
    for index, constraint in enumerate(arrays.constraints):
        where = problem.constraint_name(index)
        values = _call(
            lambda i, b, c=constraint, w=where: c(i, _earlier(b, w)), (inputs, blocks), where
        )
        _check_floating(values, where)
        if values.size == 0:
            raise ProblemError(f"{where} has no entries: it returns shape {values.shape}.")
    _validate_curvature(arrays, inputs, blocks)


def validate_numbers(problem: Problem) -> None:
    """What the numbers must satisfy whatever the shapes: sets, boxes, curvature, tolerances."""
    problem.inputs.validate()
    for index, stage in enumerate(problem.stages):
        if stage.box is not None:
            _check_box(stage.box, problem.stage_name(index))
    for index, constraint in enumerate(problem.constraints):
        tolerance = np.asarray(constraint.tolerance)
        number = tolerance.ndim == 0 and tolerance.dtype.kind in "fiu"
        if not (number and 0 <= float(tolerance) < np.inf):
            raise ProblemError(
                f"{problem.constraint_name(index)}: tolerance must be a finite number >= 0, not "
                f"{constraint.tolerance!r}."
            )
    objective = problem.objective
    for what in ("curvature_inputs", "curvature_blocks"):
        for leaf in jax.tree.leaves(getattr(objective, what)):
            _check_finite(leaf, f"Objective: {what}")
            if (np.asarray(leaf) < 0).any():
                raise ProblemError(f"Objective: {what} has a negative entry ({np.min(leaf)}).")


def _validate_stage(problem, stage, index, inputs, blocks) -> jax.ShapeDtypeStruct:
    where = problem.stage_name(index)
    if isinstance(stage, ScanStage):
        return _validate_scan(stage, where, inputs, blocks)

    def both(i, b):
        shape = stage.shape(i, _earlier(b, where))
        lower, upper, _ = stage.bounds(i, _earlier(b, where), jnp.zeros(shape.shape, shape.dtype))
        return lower, upper

    lower, upper = _call(both, (inputs, blocks), where)
    _check_pair(lower, upper, where)
    _check_box_shape(stage.box, lower.shape, where)
    return lower


def _check_pair(lower, upper, where):
    if lower.shape != upper.shape:
        raise ProblemError(
            f"{where}: lower has shape {lower.shape} but upper has shape {upper.shape}; they must "
            "be equal (use jnp.broadcast_to)."
        )
    _check_floating(lower, f"{where}: lower")
    _check_floating(upper, f"{where}: upper")


def _validate_scan(stage: ScanStage, where, inputs, blocks):
    if not isinstance(stage.length, numbers.Integral) or int(stage.length) < 1:
        raise ProblemError(
            f"{where}: length must be a positive whole number, not {stage.length!r}."
        )

    def check_leading(tree, what):
        for leaf in jax.tree.leaves(tree):
            if not hasattr(leaf, "shape"):
                continue
            if len(leaf.shape) == 0 or leaf.shape[0] != stage.length:
                raise ProblemError(
                    f"{where}: {what} must have leading axis {stage.length} (length), but one "
                    f"array has shape {tuple(leaf.shape)}."
                )

    initial, feed = _call(
        lambda i, b: stage._start(i, _earlier(b, where)),
        (inputs, blocks),
        f"{where}: initial or feed",
    )
    if not callable(stage.initial):
        _check_finite(stage.initial, f"{where}: initial")
    check_leading(feed, "feed")
    check_leading(stage.params, "params")

    def first(i, b):
        initial, feed = stage._start(i, b)
        params, feed = jax.tree.map(
            lambda x: x[0] if hasattr(x, "shape") else x, (stage.params, feed)
        )
        return stage._step(params, feed, initial, None, None)[:2]

    lower, upper = _call(first, (inputs, blocks), where)
    _check_pair(lower, upper, where)
    if lower.shape != initial.shape:
        raise ProblemError(
            f"{where}: a step maps a state of shape {initial.shape} (initial) to one of shape "
            f"{lower.shape}; they must be equal."
        )
    shape = jax.ShapeDtypeStruct((stage.length, *lower.shape), lower.dtype)
    _check_box_shape(stage.box, shape.shape, where)
    return shape


def _check_box(box, where):
    if not isinstance(box, (tuple, list)) or len(box) != 2:
        raise ProblemError(f"{where}: box must be a pair (lowest, highest).")
    for end in box:
        if np.asarray(end).dtype.kind not in "fiu":
            raise ProblemError(f"{where}: box must hold numbers, not {end!r}.")
    _check_finite(tuple(box), f"{where}: box")
    try:
        lowest, highest = np.broadcast_arrays(*(np.asarray(b) for b in box))
    except ValueError as error:
        shapes = " and ".join(str(np.shape(b)) for b in box)
        raise ProblemError(f"{where}: the two ends of box have shapes {shapes}.") from error
    if (lowest > highest).any():
        entry = tuple(int(i) for i in np.argwhere(lowest > highest)[0])
        raise ProblemError(
            f"{where}: box is empty at entry {list(entry)}: {lowest[entry]} > {highest[entry]}."
        )


def _check_box_shape(box, shape, where):
    if box is None:
        return
    shapes = tuple(np.shape(b) for b in box)
    try:
        for b in shapes:
            if np.broadcast_shapes(b, shape) != tuple(shape):
                raise ValueError
    except ValueError as error:
        raise ProblemError(
            f"{where}: box has shapes {shapes[0]} and {shapes[1]}, the block {shape}."
        ) from error


def _validate_curvature(problem, inputs, blocks):
    objective = problem.objective
    pairs = []
    if objective.curvature_inputs is not None:
        c = objective.curvature_inputs
        same = jax.tree.structure(c) == jax.tree.structure(inputs)
        if not same:
            raise ProblemError("Objective: curvature_inputs must be arranged like the inputs.")
        pairs += [
            ("curvature_inputs", a, b)
            for a, b in zip(*map(jax.tree.leaves, (c, inputs)), strict=True)
        ]
    if objective.curvature_blocks is not None:
        c = objective.curvature_blocks
        if not isinstance(c, (tuple, list)) or len(c) != len(blocks):
            raise ProblemError(
                f"Objective: curvature_blocks must be a tuple with one entry for each of the "
                f"{len(blocks)} stages."
            )
        pairs += [
            (f"curvature_blocks[{i}]", a, b) for i, (a, b) in enumerate(zip(c, blocks, strict=True))
        ]
    for what, given, like in pairs:
        array = np.asarray(given)
        try:
            np.broadcast_to(array, like.shape)
        except ValueError as error:
            raise ProblemError(
                f"Objective: {what} has shape {array.shape}, which does not broadcast to "
                f"{like.shape}."
            ) from error


def validate_options(atol, rtol, max_iterations, time_limit) -> None:
    """Raises ProblemError for tolerances and limits that make no sense."""
    for name, value in (("atol", atol), ("rtol", rtol)):
        if not (isinstance(value, numbers.Real) and math.isfinite(value) and float(value) >= 0):
            raise ProblemError(f"{name} must be a finite number >= 0, not {value!r}.")
    whole = isinstance(max_iterations, numbers.Integral) and not isinstance(max_iterations, bool)
    if not (whole and int(max_iterations) >= 0):
        raise ProblemError(f"max_iterations must be a whole number >= 0, not {max_iterations!r}.")
    timed = time_limit is None or (isinstance(time_limit, numbers.Real) and float(time_limit) > 0)
    if not timed:
        raise ProblemError(f"time_limit must be a positive number of seconds, not {time_limit!r}.")


def validate_target(target, size: int):
    """The target as a number or one number for each problem; ProblemError if it is neither."""
    if target is None:
        return None
    try:
        array = np.asarray(target, float)
    except (TypeError, ValueError) as error:
        raise ProblemError(f"target must be a number, not {target!r}.") from error
    if array.shape not in ((), (size,)):
        raise ProblemError(f"target has shape {array.shape} for {size} problem(s).")
    if np.isnan(array).any():
        raise ProblemError("target is nan.")
    return float(array) if array.ndim == 0 else array


def validate_start(problem: Problem, start) -> None:
    """Raises ProblemError unless `start` fits the problem."""
    if start is None:
        return
    if not isinstance(start, Point):
        raise ProblemError(f"start must be a stagecert.Point, not {type(start).__name__}.")
    arrays = as_arrays(problem)
    for leaf in jax.tree.leaves((start.inputs, start.fractions)):
        if not np.issubdtype(np.asarray(leaf).dtype, np.number):
            raise ProblemError(f"start must hold numbers, not {leaf!r}.")
    _check_finite((start.inputs, start.fractions), "start")
    if start.inputs is not None:
        like = jax.eval_shape(arrays.inputs.centre)
        if jax.tree.structure(like) != jax.tree.structure(start.inputs) or [
            x.shape for x in jax.tree.leaves(like)
        ] != [np.shape(x) for x in jax.tree.leaves(start.inputs)]:
            raise ProblemError("start: inputs are not arranged like a point of the problem's set.")
    if isinstance(start.fractions, (tuple, list)):
        shapes = arrays.block_shapes()
        if len(shapes) != len(start.fractions):
            raise ProblemError(
                f"start: {len(start.fractions)} arrays of fractions for {len(shapes)} stages."
            )
        for i, (shape, given) in enumerate(zip(shapes, start.fractions, strict=True)):
            if np.shape(given) not in ((), shape.shape):
                raise ProblemError(
                    f"start: fractions of stage {i} have shape {np.shape(given)}, the block "
                    f"{shape.shape}."
                )
    elif start.fractions is None or np.ndim(start.fractions) != 0:
        raise ProblemError(
            "start: fractions must be one number, or a tuple with one array a stage."
        )
