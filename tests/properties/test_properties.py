"""Properties: what a file says, exactly, and how it is told when it says nothing sensible."""

import gzip
import math
import pickle
import random
import re
import time
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagecert.errors import ProblemError
from stagecert_check.properties import PropertyError, load
from stagecert_check.properties.normal import ceil64, floor64
from stagecert_check.properties.reader import MAX_DEPTH

OLD = "".join(f"(declare-const {v}_{i} Real)\n" for v in "XY" for i in range(2))
OLD_BOX = "".join(f"(assert (>= X_{i} -1))\n(assert (<= X_{i} 1))\n" for i in range(2))
NEW = """(vnnlib-version <2.0>)
(declare-network f
  (declare-input X float32 [1,2])
  (declare-output Y float32 [2]))
"""
NEW_BOX = "".join(f"(assert (>= X[0,{i}] -1))\n(assert (<= X[0,{i}] 1))\n" for i in range(2))


def old(assertions):
    return load(OLD + OLD_BOX + assertions)


def test_box_and_output_rows():
    property = old("(assert (<= Y_0 Y_1))\n(assert (> (* 2 Y_0) 0.1))")
    assert property.version == "1.0"
    assert property.status == "ready"
    assert not property.empty
    (case,) = property.cases
    assert list(case.input_lower) == [Fraction(-1)] * 2
    assert list(case.input_upper) == [Fraction(1)] * 2
    assert case.input_lower64.dtype == np.float64
    assert not case.input_lower64.flags.writeable
    assert case.input_rows == ()
    first, second = case.outputs
    assert first.outputs == ((0, 1), (1, -1))
    assert (first.bound, first.strict) == (0, False)
    assert second.outputs == ((0, -1),)  # bounds on one variable are scaled
    assert (second.bound, second.strict) == (Fraction(-1, 20), True)
    dense = case.dense_outputs()
    assert dense.inputs is None
    assert dense.outputs is not None
    assert dense.outputs.tolist() == [[1, -1], [-1, 0]]
    assert dense.bound.tolist() == [0, Fraction(-1, 20)]
    assert dense.strict.tolist() == [False, True]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.1", Fraction(1, 10)),
        ("-3", Fraction(-3)),
        ("(- 3)", Fraction(-3)),
        ("(- 3 1 1)", Fraction(1)),
        ("(/ 1 3)", Fraction(1, 3)),
        ("(/ (- 1) 3)", Fraction(-1, 3)),
        ("1e-3", Fraction(1, 1000)),
        ("-1.25E+2", Fraction(-125)),
        (".5", Fraction(1, 2)),
        ("1.", Fraction(1)),
        ("1e-330", Fraction(1, 10**330)),
        ("(+ 1 2 (* 2 3))", Fraction(9)),
        ("0.1000000000000000055511151231257827021181583404541015625", Fraction(0.1)),
    ],
)
def test_numbers_are_exact(text, value):
    (case,) = old(f"(assert (<= Y_0 {text}))").cases
    assert case.outputs[0].bound == value


@given(st.fractions() | st.floats(allow_nan=False, allow_infinity=False).map(Fraction))
def test_float_bounds_are_the_tightest_outside(value):
    below, above = floor64(value), ceil64(value)
    assert Fraction(below) <= value <= Fraction(above)
    assert above == below or above == math.nextafter(below, math.inf)


def test_float_bounds_beyond_the_range_of_floats():
    huge = Fraction(10) ** 400
    assert (floor64(huge), ceil64(huge)) == (math.nextafter(math.inf, 0), math.inf)
    assert (floor64(-huge), ceil64(-huge)) == (-math.inf, math.nextafter(-math.inf, 0))
    assert (floor64(1 / huge), ceil64(1 / huge)) == (0.0, 5e-324)


def test_float_box_contains_the_exact_one():
    property = load(OLD + OLD_BOX + "(assert (<= X_0 0.1))(assert (>= X_0 0.1))")
    (case,) = property.cases
    assert Fraction(case.input_lower64[0]) < Fraction(1, 10) < Fraction(case.input_upper64[0])


def test_disjunctions_share_input_sets():
    property = old(
        "(assert (or (<= X_0 0) (and (>= X_0 0.5) (<= X_1 0))))"
        "(assert (or (<= Y_0 0) (<= Y_1 0) (and (>= Y_0 1) (>= Y_1 1))))"
    )
    assert len(property.cases) == 6
    assert [len(cases) for _, cases in property.groups] == [3, 3]
    assert property.cases[0].inputs is property.cases[1].inputs


def test_rows_on_inputs_and_mixed_rows():
    property = old("(assert (<= (+ X_0 X_1) 0.5))(assert (<= (- Y_0 (* 3 X_1)) X_0))")
    (case,) = property.cases
    (row,) = case.input_rows
    assert row.inputs == ((0, 1), (1, 1))
    (mixed,) = case.outputs
    assert mixed.inputs == ((0, -1), (1, -3))
    assert mixed.outputs == ((0, 1),)
    dense = case.dense_outputs()
    assert dense.inputs is not None
    assert dense.inputs.tolist() == [[-1, -3]]
    assert case.counterexample([0.25, 0.25], [1.0, 0.0])
    assert not case.counterexample([0.5, 0.25], [1.0, 0.0])


def test_strict_bounds_stay_strict():
    (case,) = old("(assert (< X_0 0.5))(assert (> Y_0 1))").cases
    assert case.input_upper[0] == Fraction(1, 2)
    assert not case.counterexample([0.5, 0], [2, 0])
    assert case.counterexample([np.nextafter(0.5, 0), 0], [np.nextafter(1.0, 2), 0])
    assert not case.counterexample([0, 0], [1, 0])
    assert case.counterexample([0.5, 0], [1, 0], tolerance=1e-9)


def test_equality_inequality_and_not():
    assert len(old("(assert (= Y_0 Y_1))").cases[0].outputs) == 2
    assert len(old("(assert (!= Y_0 Y_1))").cases) == 2
    property = old("(assert (not (and (<= Y_0 0) (not (> Y_1 0)))))")
    assert len(property.cases) == 2
    assert property.counterexample([0, 0], [1, 0])
    assert property.counterexample([0, 0], [0, 1])
    assert not property.counterexample([0, 0], [0, 0])


def test_counterexample_reads_floats_exactly_and_refuses_nonsense():
    (case,) = old("(assert (<= Y_0 0.1))").cases
    assert not case.counterexample([0, 0], [0.1, 0])  # the float 0.1 is above 1/10
    assert case.counterexample([0, 0], [Fraction(1, 10), 0])
    assert case.counterexample(np.zeros((1, 2), np.float32), np.zeros((2, 1), np.float16))
    for bad in (math.nan, math.inf, -math.inf):
        assert not case.counterexample([0, 0], [bad, 0])
        assert not case.counterexample([bad, 0], [0, 0])
    with pytest.raises(PropertyError, match="x has 3 entries; the property has 2"):
        case.counterexample([0, 0, 0], [0, 0])
    for bad in (["a", "b"], [1j, 0], [[0], [0, 0]], [None, 0]):
        with pytest.raises(PropertyError, match="y must be an array of real numbers"):
            case.counterexample([0, 0], bad)
    for bad in (-1, math.nan, "a"):
        with pytest.raises(PropertyError, match="tolerance"):
            case.counterexample([0, 0], [0, 0], tolerance=bad)


def test_empty_cases_are_dropped_with_a_note():
    property = old("(assert (or (<= X_0 -2) (>= X_0 0)))(assert (<= Y_0 0))")
    assert len(property.cases) == property.dropped == 1
    assert property.notes == ("Case 1 of 2 has no input: X_0 >= -1 and X_0 <= -2.",)


@pytest.mark.parametrize(
    "assertion",
    [
        "(assert (>= X_0 2))",
        "(assert (> X_0 1))",
        "(assert (>= (+ X_0 X_1) 2.5))",
        "(assert (> (+ X_0 X_1) 2))",
        "(assert (< X_0 X_0))",
        "(assert (or (<= 1 0) (>= X_1 7)))",
    ],
)
def test_empty_properties_say_so(assertion):
    property = old(assertion + "(assert (<= Y_0 0))")
    assert property.status == "empty"
    assert property.empty
    assert property.notes
    assert not property.counterexample([0, 0], [0, 0])


def test_an_empty_case_needs_no_other_bounds():
    assert load(OLD + "(assert (>= X_0 2))(assert (<= X_0 1))").empty


def test_missing_bounds_are_named():
    with pytest.raises(PropertyError, match=r"the input X_1 has no upper bound"):
        load(OLD + "(assert (<= X_0 1))(assert (>= X_0 1))(assert (>= X_1 1))")
    with pytest.raises(PropertyError, match=r"the input X\[0,1\] has no lower bound"):
        load(NEW + "(assert (<= X[0,0] 1))(assert (>= X[0,0] 1))(assert (<= X[0,1] 1))")
    with pytest.raises(PropertyError, match=r"X_0 has no lower bound \(nor have 1 other inputs\)"):
        load(OLD)


def test_bounds_that_follow_from_rows_count():
    property = load(OLD + "(assert (<= X_0 1))(assert (>= X_0 0))(assert (= X_1 (+ (* -2 X_0) 1)))")
    (case,) = property.cases
    assert (case.input_lower[1], case.input_upper[1]) == (-1, 1)
    assert len(case.input_rows) == 2


def test_version_two():
    property = load(
        """; a comment (with brackets
        (vnnlib-version <2.0>)
        (declare-network f
            (declare-input A Real [2]) (declare-input B real [1, 1])
            (declare-hidden H Real [3] "layer \\"1\\"")
            (declare-output Y Real []))
        (declare-network g (equal-to f)
            (declare-input C Real [2]) (declare-input D real [1 1])
            (declare-output Z Real []))
        (declare-network h (isomorphic-to f)
            (declare-input E float32 [2]) (declare-input F float32 [1,1])
            (declare-output W float32 []))
        (assert (and (>= A[0] 0) (<= A[0] 1) (== A[1] A[0]) (== B[0,0] 2)))
        (assert (and (== C[0] A[0]) (== C[1] A[1]) (== D [ 0, 0 ] B[0,0])))
        (assert (and (== E[0] A[0]) (== E[1] A[1]) (== F[0,0] B[0,0])))
        (assert (!= Y Z)) (assert (<= H[2] W))
        """
    )
    assert property.version == "2.0"
    assert [n.name for n in property.networks] == ["f", "g", "h"]
    assert property.networks[1].equal_to == "f"
    assert property.networks[2].isomorphic_to == "f"
    assert property.networks[0].hidden[0].node == 'layer "1"'
    assert [t.shape for t in property.inputs] == [(2,), (1, 1)] * 3
    assert property.sizes == (9, 3, 3)
    assert len(property.cases) == 2
    x = [0.5, 0.5, 2] * 3
    assert property.counterexample(x, [1, 2, 3], hidden=[9, 9, 3])
    assert not property.counterexample(x, [1, 1, 3], hidden=[9, 9, 3])
    assert not property.counterexample(x, [1, 2, 3], hidden=[9, 9, 4])
    with pytest.raises(PropertyError, match="give them as `hidden`"):
        property.counterexample(x, [1, 2, 3])
    with pytest.raises(PropertyError, match="hidden values"):
        property.cases[0].dense_outputs()


@pytest.mark.parametrize("operator", ["<", "<=", ">", ">=", "==", "!="])
def test_a_comparison_between_its_operands(operator):
    box = "(assert (and (>= X[0,0] 0) (<= X[0,0] 1) (>= X[0,1] 0) (<= X[0,1] 1)))"
    for right in ("X[0,1]", "0.5"):
        odd, plain = (
            load(NEW + f"{box}(assert (not {formula}))(assert (or {formula} (< Y[0] 2)))")
            for formula in (f"(X[0,0] {operator} {right})", f"({operator} X[0,0] {right})")
        )
        assert odd.notes[1:] == plain.notes
        assert f"is read as ({operator} X[0,0] {right})" in odd.notes[0]
        cases = [
            [
                (list(case.input_lower), list(case.input_upper), case.input_rows)
                for case in one.cases
            ]
            for one in (odd, plain)
        ]
        assert cases[0] == cases[1]
    for text in ("(X[0,0] < (+ X[0,1] 1))", "(X[0,0] < X[0,1] 1)", "(1 < X[0,1])", "(X[0,0] + 1)"):
        with pytest.raises(PropertyError):
            load(NEW + box + f"(assert {text})")


def test_sources(tmp_path):
    text = OLD + OLD_BOX + "(assert (<= Y_0 1))"
    plain, packed = tmp_path / "p.vnnlib", tmp_path / "p.vnnlib.gz"
    plain.write_bytes(b"\xef\xbb\xbf; caf\xe9\r\n" + text.replace("\n", "\r\n").encode())
    packed.write_bytes(gzip.compress(text.encode()))
    for source in (text, text.encode(), plain, str(plain), packed, gzip.compress(text.encode())):
        assert len(load(source).cases) == 1
    assert load(plain).source == str(plain)
    with pytest.raises(PropertyError, match="cannot be read: No such file"):
        load(tmp_path / "absent.vnnlib")
    for bad in (tmp_path, "a\0b", ""):
        with pytest.raises(PropertyError):
            load(bad)
    with pytest.raises(PropertyError, match="not a int"):
        load(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(PropertyError, match="gzip"):
        load(packed.read_bytes()[:-9])
    with pytest.raises(PropertyError, match="larger than 10 bytes"):
        load(plain, max_bytes=10)
    with pytest.raises(PropertyError, match="larger than 1,000,000 bytes"):
        load(gzip.compress(b" " * 2_000_000), max_bytes=1_000_000)


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_a_comment_ends_with_its_line(line_end):
    """With carriage returns alone it went on to the end of the file, over all assertions."""
    lines = [*OLD.splitlines(), "; the box", *OLD_BOX.splitlines(), "; (", "(assert (<= Y_0 1))"]
    text = line_end.join(lines)
    for source in (text, text.encode(), "\ufeff" + text):
        (case,) = load(source).cases
        assert list(case.input_lower) == [-1, -1]
        assert len(case.outputs) == 1
    with pytest.raises(PropertyError) as caught:
        load(text + line_end + "(assert)")
    assert caught.value.line == len(lines) + 1


@pytest.mark.parametrize("character", ["\v", "\f", "\x1c", "\x85", "\u2028", "\u2029"])
def test_characters_that_may_or_may_not_end_a_comment_are_refused(character):
    """An editor shows two lines, and the second one would be lost without a word."""
    start = OLD + OLD_BOX + "; only"
    with pytest.raises(PropertyError, match="ends at a line feed") as caught:
        load(start + character + "(assert (<= Y_0 1))")
    assert caught.value.line == 9
    assert len(load(start + character + " \n(assert (<= Y_0 1))").cases[0].outputs) == 1


@pytest.mark.parametrize(
    "name", ["|X_0 ; |", "|X_0|", "X_0\0", "\ufeffX_0", "X_0\u2028", "X_0\xa0"]
)
def test_names_that_only_look_right_are_refused(name):
    with pytest.raises(PropertyError):
        old(f"(assert (<= {name} 0))\n)")
    with pytest.raises(PropertyError):
        old(f"(assert (<= {name} 0))")


@pytest.mark.parametrize(
    ("text", "line", "column", "found", "expected"),
    [
        (OLD + "(assert (<= X_0 1)", 5, 19, "end of file", "')'"),
        (OLD + "(assert (<= X_7 1))", 5, 13, "X_7", "a declared variable"),
        (OLD + "(assert\n  (<= X_0 1..2))", 6, 11, "1..2", "a number"),
        (OLD + "(assert (=> X_0 1))", 5, 10, "=>", "a comparison"),
        (OLD + "(assert (<= X_0 (% 1 2)))", 5, 18, "%", "an arithmetic operator"),
        (OLD + "(assert (<= X_0 (<= 1 2)))", 5, 18, "<=", "an arithmetic operator"),
        (OLD + "(assert (<= X_0 1 2))", 5, 20, ")", "two operands"),
        (OLD + "(assert (and))", 5, 13, ")", "at least one operand"),
        (OLD + "(assert (and X_0))", 5, 14, "X_0", "'('"),
        (OLD + "(assert (<= (/ X_0 Y_0) 1))", 5, 13, "/", "a constant divisor"),
        (OLD + "(assert (<= (/ X_0 0) 1))", 5, 13, "/", "other than zero"),
        (OLD + "(assert (<= X_0 1e999999999))", 5, 17, "1e999999999", "an exponent of at most"),
        (OLD + "(check-sat)", 5, 2, "check-sat", "declare-const and assert"),
        (OLD + ")", 5, 1, ")", "the start of a command"),
        ("(declare-network f)", 1, 2, "declare-network", "start with (vnnlib-version <2.0>)"),
        (OLD + '(assert "', 5, 9, '"', "'('"),
        (OLD + "(assert (<= X_0 \u0663))", 5, 17, "\u0663", "a number"),
        (OLD + "(declare-const X_0 Real)", 5, 16, "X_0", "not declared yet"),
        (OLD + "(declare-const X_9 Real)", 5, 16, "X_9", "a declaration of X_2 as well"),
        (OLD + "(declare-const X_999999999999 Real)", 5, 16, "X_999999999999", "an index below"),
        (OLD + "(declare-const Z_0 Real)", 5, 16, "Z_0", "a variable X_0"),
        (OLD + "(declare-const X_2 Int)", 5, 20, "Int", "Real"),
        ("(declare-const X_0 Real)", 1, 25, "end of file", "a declaration of Y_0"),
        ("(vnnlib-version <3.0>)", 1, 17, "<3.0>", "versions 1 and 2"),
        ("(vnnlib-version <2.0>)", 1, 23, "end of file", "declare-network"),
        ("(vnnlib-version <2.0>)(assert (<= 1 2))", 1, 24, "assert", "before the first assertion"),
        (NEW + "(assert (<= X[0,2] 1))", 5, 13, "X[0,2]", "which has the shape [1,2]"),
        (NEW + "(assert (<= X[0] 1))", 5, 13, "X[0]", "which has the shape [1,2]"),
        (NEW + "(assert (<= X[-1] 1))", 5, 13, "X", "which has the shape [1,2]"),
        (NEW + "(assert (<= X[0,] 1))", 5, 13, "X[0,]", "whole numbers"),
        (NEW + "(assert (<= f 1))", 5, 13, "f", "a tensor"),
        (NEW + "(assert (<= 0 1))(declare-network g)", 5, 19, "declare-network", "assert"),
        (NEW + "(declare-network g (equal-to e))", 5, 30, "e", "an earlier network"),
        (NEW + "(declare-network f)", 5, 18, "f", "not declared yet"),
        (NEW + "(declare-network g)", 5, 19, ")", "at least one declare-input"),
        (NEW + "(declare-network g (declare-input g Real [1]))", 5, 35, "g", "not declared yet"),
        (NEW + "(declare-network g (declare-input A Real))", 5, 37, "Real", "a shape"),
        (NEW + "(declare-network g (declare-input A bool [1]))", 5, 37, "bool [1]", "float32"),
        (
            NEW + "(declare-network g (declare-input A Real [0]))",
            5,
            37,
            "Real [0]",
            "without zeros",
        ),
        (
            NEW + "(declare-network g (declare-input A Real [1000000,1000000]))",
            5,
            37,
            None,
            "at most",
        ),
        (NEW + "(declare-network g (declare-input A Real [1] initialized))", 5, 46, None, "')'"),
        (NEW + "(declare-network g (declare-hidden A Real [1]))", 5, 46, ")", "double quotes"),
        (
            NEW + "(declare-network g (equal-to f)(declare-input A float32 [2])"
            "(declare-output B float32 [2]))",
            5,
            21,
            "equal-to",
            "the same inputs",
        ),
    ],
)
def test_errors_have_a_place(text, line, column, found, expected):
    with pytest.raises(PropertyError) as caught:
        load(text)
    error = caught.value
    assert isinstance(error, ProblemError)
    assert (error.line, error.column) == (line, column)
    assert found is None or error.found == found
    assert expected in (error.expected or "")
    assert str(error).startswith(f"<text>:{line}:{column}: found ")
    assert pickle.loads(pickle.dumps(error)).line == line


def timed(text, match=None):
    start = time.process_time()
    if match is None:
        load(text)
    else:
        with pytest.raises(PropertyError, match=match):
            load(text)
    assert time.process_time() - start < 10


@pytest.mark.parametrize(
    ("rows", "cases"),
    [
        ("(> Y_0 (+ Y_1 0.05)) (< Y_0 (- Y_1 0.05))", 0),
        ("(> Y_0 (+ Y_1 0.05)) (< (* 2 Y_0) (+ (* 2 Y_1) 0.1))", 0),
        ("(> Y_0 (+ Y_1 0.05)) (< (* 2 Y_0) (+ (* 2 Y_1) 0.1000001))", 1),
        ("(>= Y_0 X_1) (<= Y_0 X_1)", 1),  # equal
        ("(>= Y_0 X_1) (< Y_0 X_1)", 0),
        ("(>= Y_0 1) (<= Y_0 2) (<= Y_0 0.5)", 0),
        ("(>= Y_0 1) (<= Y_1 0.5)", 1),
    ],
)
def test_cases_whose_rows_exclude_each_other_are_left_out(rows, cases):
    property = load(OLD + OLD_BOX + f"(assert (and {rows}))")
    assert (len(property.cases), property.dropped) == (cases, 1 - cases)
    if not cases:
        assert property.notes == ("Case 1 of 1 has no output: two of its rows exclude each other.",)


def test_hostile_files_end_soon():
    box = OLD + OLD_BOX
    deep = MAX_DEPTH - 10
    timed(box + "(assert " + "(and " * 10**5 + "(<= Y_0 1)" + ")" * 10**5 + ")", "nested brackets")
    timed(box + "(assert " + "(not " * deep + "(<= Y_0 1)" + ")" * deep + ")")
    timed(box + "(assert (<= Y_0 " + "(- 1 " * deep + "X_0" + ")" * deep + "))")
    choice = "(or (<= Y_0 1) (<= Y_1 2))"
    timed(box + f"(assert {choice})" * 17, "131,072 cases; the limit is 100,000")
    timed(box + f"(assert (and {choice * 50}))", "multiplied out")
    timed(box + f"(assert {choice})" * 1000, "multiplied out")
    timed(box + "(assert (<= Y_0 (* " + "1e400 " * 1000 + ")))", "10000 bits")
    parts = " ".join(f"(/ 1 {i})" for i in range(1, 10_000))
    timed(box + f"(assert (<= Y_0 (+ {parts})))", "10000 bits")
    timed("(" + "a" * 10**6, "2000 characters")
    timed('"' + '\\"' * 10**6, "start of a command")
    timed(NEW.replace("[1,2]", "[60000000]"), "59,999,999 other inputs")


def test_a_hundred_thousand_assertions_take_seconds():
    n = 50_000
    text = "".join(f"(declare-const X_{i} Real)\n" for i in range(n)) + "(declare-const Y_0 Real)\n"
    text += "".join(f"(assert (<= X_{i} 0.{i}))\n(assert (>= X_{i} -0.{i}))\n" for i in range(n))
    timed(text)


# Random formulas, printed, read and compared with their direct evaluation

NUMBERS = [Fraction(n, d) for n, d in product((-3, -1, 0, 1, 2), (1, 2, 3))]
number = st.sampled_from(NUMBERS)
leaf = st.one_of(
    st.tuples(st.just("number"), number), st.tuples(st.just("variable"), st.integers(0, 3))
)
term = st.recursive(
    leaf,
    lambda inner: st.one_of(
        st.tuples(st.sampled_from("+-"), st.lists(inner, min_size=1, max_size=3)),
        st.tuples(st.just("scale"), number, inner, st.booleans()),
        st.tuples(st.just("divide"), inner, number.filter(bool)),
    ),
    max_leaves=4,
)
comparison = st.tuples(st.sampled_from(["<=", ">=", "<", ">", "=", "==", "!="]), term, term)
boolean = st.recursive(
    comparison,
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(["and", "or"]), st.lists(inner, min_size=1, max_size=3)),
        st.tuples(st.just("not"), inner),
    ),
    max_leaves=5,
)
COMPARE = {
    "<=": lambda a, b: a <= b,
    ">=": lambda a, b: a >= b,
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
    "=": lambda a, b: a == b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
}


def show_number(value):
    if value.denominator in (1, 2):
        return repr(float(value)) if value.denominator == 2 else str(value.numerator)
    return f"(/ {value.numerator} {value.denominator})"


def show(tree, names):
    kind = tree[0]
    if kind == "number":
        return show_number(tree[1])
    if kind == "variable":
        return names[tree[1]]
    if kind == "scale":
        parts = [show_number(tree[1]), show(tree[2], names)]
        return f"(* {' '.join(parts[::-1] if tree[3] else parts)})"
    if kind == "divide":
        return f"(/ {show(tree[1], names)} {show_number(tree[2])})"
    parts = tree[1] if isinstance(tree[1], list) else tree[1:]
    return f"({kind} {' '.join(show(part, names) for part in parts)})"


def evaluate(tree, values):
    kind = tree[0]
    if kind == "number":
        return tree[1]
    if kind == "variable":
        return values[tree[1]]
    if kind == "scale":
        return tree[1] * evaluate(tree[2], values)
    if kind == "divide":
        return evaluate(tree[1], values) / tree[2]
    if kind in COMPARE:
        return COMPARE[kind](evaluate(tree[1], values), evaluate(tree[2], values))
    if kind == "not":
        return not evaluate(tree[1], values)
    parts = [evaluate(part, values) for part in tree[1]]
    if kind == "and":
        return all(parts)
    if kind == "or":
        return any(parts)
    if kind == "+":
        return sum(parts)
    return parts[0] - sum(parts[1:]) if len(parts) > 1 else -parts[0]


@settings(max_examples=400)
@given(
    st.lists(boolean, min_size=1, max_size=3),
    st.lists(st.lists(number, min_size=4, max_size=4), min_size=8, max_size=8),
    st.booleans(),
)
def test_random_formulas(formulas, points, new):
    if new:
        head, names = NEW + NEW_BOX, ["X[0,0]", "X[0,1]", "Y[0]", "Y[1]"]
    else:
        head, names = OLD + OLD_BOX, ["X_0", "X_1", "Y_0", "Y_1"]
    property = load(head + "\n".join(f"(assert {show(f, names)})" for f in formulas))
    for point in points:
        inside = all(-1 <= v <= 1 for v in point[:2])
        expected = inside and all(evaluate(f, point) for f in formulas)
        assert property.counterexample(point[:2], point[2:]) == expected
        assert any(c.counterexample(point[:2], point[2:]) for c in property.cases) == expected


# Damaged files

SEEDS = [
    OLD + OLD_BOX + "(assert (or (and (<= Y_0 (* 2.0 Y_1)) (not (= X_0 (/ 1 3)))) (> Y_1 1e-3)))",
    OLD + OLD_BOX + "(assert (>= (+ Y_0 (- X_1) (- 3)) 0)) ; end",
    NEW + NEW_BOX + "(assert (or (!= Y[0] Y[1]) (and (== X[0,1] -0.25) (< Y[1] (- Y[0] 2)))))",
    NEW
    + "(declare-network g (equal-to f) (declare-input A float32 [1, 2])\n"
    + '(declare-hidden H Real [] "n") (declare-output B float32 [2]))'
    + NEW_BOX
    + NEW_BOX.replace("X", "A")
    + "(assert (<= B[0] (+ Y[0] H)))",
]
PIECES = [
    "(",
    ")",
    "[",
    "]",
    ",",
    ";",
    '"',
    "\\",
    "<2.0>",
    "1e400",
    "1e-99999",
    "X_0",
    "Y[9]",
    "not",
]
PIECES += ["and", "or", "-", "*", "/", "0", "\0", "\u00e9", "\n", "(/ 1 0)", "declare-const", "()"]


EXCHANGES = [
    ["<=", ">=", "<", ">", "=", "==", "!="],
    ["and", "or", "not"],
    ["+", "-", "*", "/"],
    ["0", "1", "-1", "-7", "1e-3", "(/ 2 7)", "3", "2.0"],
    ["X_0", "X_1", "Y_0", "Y_1"],
    ["X[0,0]", "X[0,1]", "Y[0]", "Y[1]", "A[0,0]", "H"],
]


def damage(rng, text):
    """The text with a few random faults, or with other operators and operands, as bytes."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        kind = rng.randrange(12)
        i, j = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        tokens = re.findall(r"\s+|[()]|[^\s()]+", text) or [""]
        a, b = rng.randrange(len(tokens)), rng.randrange(len(tokens))
        if kind == 0:
            text = text[:i]
        elif kind == 1:
            text = text[:i] + text[min(j, i + 20) :]
        elif kind == 2:
            text = text[:i] + rng.choice(PIECES) + text[i:]
        elif kind == 3:
            text = text[:j] + text[i:j] + text[j:]
        elif kind == 4:
            lines = text.split("\n")
            rng.shuffle(lines)
            text = "\n".join(lines)
        elif kind == 5:
            tokens[a], tokens[b] = tokens[b], tokens[a]
            text = "".join(tokens)
        else:  # half of the time the structure stays whole, so that faults deep inside are reached
            start = tokens.index("assert") if "assert" in tokens else 0
            group = rng.choice(EXCHANGES)
            for n in range(start, len(tokens)):
                if tokens[n] in group and rng.random() < 0.3:
                    tokens[n] = rng.choice(group)
            text = "".join(tokens)
    data = bytearray(text.encode())
    for _ in range(rng.choice((0, 0, 0, 1, 3))):
        if data:
            data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def read_damaged(seed, count):
    """How many of the damaged files can be read; each is read or refused, and soon."""
    rng = random.Random(seed)
    good, slowest = 0, 0.0
    for _ in range(count):
        data = damage(rng, rng.choice(SEEDS))
        if rng.random() < 0.05:
            data = bytearray(gzip.compress(data, mtime=0))
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            data = bytes(data)
        start = time.process_time()
        try:
            load(data)
            good += 1
        except PropertyError as error:
            assert str(error)  # noqa: PT017  (most damaged files end here, and some do not)
        slowest = max(slowest, time.process_time() - start)
    return good, slowest


def test_damaged_files_are_read_or_refused():
    assert all(load(text).status == "ready" for text in SEEDS)
    good, slowest = read_damaged(seed=1, count=5000)
    assert 500 < good < 4500
    assert slowest < 2
