"""Every production of the published grammar of VNN-LIB 2, and where this reader takes more or less.

Each entry is a small query: what the production is called there, declarations, an assertion, and a
point that is a counterexample followed by one that is not.
"""

import pytest

from stagecert_check.properties import PropertyError, load

VERSION = "(vnnlib-version <2.0>)"
F = "(declare-network f (declare-input X real [2]) (declare-output Y real []))"
BOX = "(assert (and (>= X[0] -2) (<= X[0] 2) (>= X[1] -2) (<= X[1] 2)))"

# (production, assertion, x and y of a counterexample, of none)
FORMULAS = [
    ("ScalarVarExpr", "(<= Y 1)", (0, 0, 1), (0, 0, 2)),
    ("TensorVarExpr", "(<= X[1] Y)", (9, 1, 1), (9, 1, 0)),
    ("ValExpr", "(<= -1.5 Y)", (0, 0, -1.5), (0, 0, -2)),
    ("Negate", "(<= (- X[0]) Y)", (-1, 0, 1), (-1, 0, 0)),
    ("Plus of one", "(<= (+ X[0]) Y)", (1, 0, 1), (1, 0, 0)),
    ("Plus", "(<= (+ X[0] X[1] 0.5) Y)", (1, 1, 2.5), (1, 1, 2)),
    ("Minus", "(<= (- X[0] X[1] 0.5) Y)", (1, 1, -0.5), (1, 1, -1)),
    ("Multiply by numbers", "(<= (* 2 X[0] 3) Y)", (1, 0, 6), (1, 0, 5)),
    ("Multiply", "(<= (* X[0] X[1]) Y)", (-1, 2, -2), (-1, 2, -3)),
    ("Multiply sums", "(<= (* (+ X[0] 1) (- X[1] Y)) 0)", (1, 1, 1), (1, 1, 0)),
    ("Multiply three", "(>= (* X[0] X[0] X[0]) Y)", (-2, 0, -8), (-2, 0, -7)),
    ("GreaterThan", "(> Y 1)", (0, 0, 1.5), (0, 0, 1)),
    ("LessThan", "(< Y 1)", (0, 0, 0.5), (0, 0, 1)),
    ("GreaterEqual", "(>= Y 1)", (0, 0, 1), (0, 0, 0.5)),
    ("LessEqual", "(<= Y 1)", (0, 0, 1), (0, 0, 1.5)),
    ("NotEqual", "(!= Y 1)", (0, 0, 2), (0, 0, 1)),
    ("Equal", "(== Y 1)", (0, 0, 1), (0, 0, 2)),
    ("And", "(and (<= Y 1) (>= Y 0) (<= X[0] Y))", (0, 0, 0.5), (0, 0, 2)),
    ("Or", "(or (<= Y 0) (>= Y 1))", (0, 0, 1), (0, 0, 0.5)),
    ("And of one", "(and (<= Y 1))", (0, 0, 1), (0, 0, 2)),
    ("Or in And in Or", "(or (and (<= Y 0) (or (== X[0] 1) (== X[0] 2))) (>= Y 9))",
     (2, 0, -1), (0, 0, -1)),
]  # fmt: skip


@pytest.mark.parametrize(("formula", "yes", "no"), [entry[1:] for entry in FORMULAS],
                         ids=[entry[0] for entry in FORMULAS])  # fmt: skip
def test_formulas(formula, yes, no):
    property = load(f"{VERSION}{F}{BOX.replace('2', '9')}".replace("[9]", "[2]")
                    + f"(assert {formula})")  # fmt: skip
    assert property.counterexample(yes[:2], yes[2:])
    assert not property.counterexample(no[:2], no[2:])


@pytest.mark.parametrize(
    ("production", "text"),
    [
        ("ScalarDims", "(declare-network f (declare-input X real []) (declare-output Y real []))"),
        ("TensorDims", "(declare-network f (declare-input X real [1,2])"
         "(declare-output Y real [4]))"),
        ("InputDef twice", "(declare-network f (declare-input X real [2])"
         "(declare-input V real [1]) (declare-output Y real []))"),
        ("OutputDef twice", "(declare-network f (declare-input X real [2])"
         "(declare-output Y real []) (declare-output Z real [3]))"),
        ("HiddenDef", '(declare-network f (declare-input X real [2])'
         '(declare-hidden H real [2] "a/b")'
         '(declare-hidden G real [] "\\"\\\\\\n\\t") (declare-output Y real []))'),
        ("IsomorphicTo", F + "(declare-network g (isomorphic-to f) (declare-input V real [2])"
         "(declare-output W real []))"),
        ("EqualTo", F + "(declare-network g (equal-to f) (declare-input V real [2])"
         "(declare-output W real []))"),
        ("NetworkDef thrice", F + "".join(
            f"(declare-network {n} (declare-input X_{n} real [1]) (declare-output Y_{n} real [1]))"
            for n in ("g_1", "Hh"))),
        ("DType", "(declare-network f (declare-input X float16 [2]) (declare-output Y int64 []))"),
        ("comment", F + "; (declare-network\n"),
    ],
)  # fmt: skip
def test_declarations(production, text):
    # No input satisfies 1 <= 0, so none needs bounds.
    property = load(f"{VERSION}\n{text}\n(assert (<= 1 0))")
    assert property.status == "empty"
    assert len(property.networks) == text.split(";")[0].count("declare-network")
    kinds = ("inputs", "hidden", "outputs")
    declared = [text.count(f"declare-{kind.rstrip('s')}") for kind in kinds]
    assert [len(getattr(property, kind)) for kind in kinds] == declared


def test_names_of_nodes_are_unescaped():
    hidden = '(declare-hidden H real [] "\\"a\\\\\\n\\t")'
    text = f"(declare-input X real [2]) {hidden} (declare-output Y real [])"
    property = load(f"{VERSION}(declare-network f {text})(assert (<= 1 0))")
    assert property.hidden[0].node == '"a\\\n\t'


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (F.replace("real [2]", "real [2] initialized") + "(assert (<= Y 0))", "model's default"),
        (F + "(assert (<= (+) 0))", "at least one operand"),
        (F + "(assert (<= (/ X[0] X[1]) 0))", "constant divisor"),
        (F + "(assert (and))", "at least one operand"),
        (F + "(assert (<= Y 0 1))", "two operands"),
        (F + "(assert (<= X[2] 0))", "which has the shape"),
        (F + "(assert (<= X 0))", "which has the shape"),
        (F + "(assert (<= Y 0)) " + F.replace("f", "g"), "before the assertions"),
        (F.replace("(declare-output Y real [])", ""), "at least one declare-output"),
        (F.replace("declare-output Y", "declare-output X"), "not declared yet"),
    ],
)
def test_what_is_refused(text, reason):
    with pytest.raises(PropertyError, match=reason):
        load(VERSION + text)


def test_what_is_read_beyond_the_grammar():
    # In files that are in use: exponents, signs, `=`, `not`, quotients by numbers, infix.
    for formula in ("(<= Y 1e-3)", "(<= +.5 Y)", "(= Y 1)", "(not (<= Y 0))", "(<= (/ Y 3) 1)",
                    "(Y < 1)"):  # fmt: skip
        assert load(f"{VERSION}{F}{BOX}(assert {formula})").status == "ready"
    # And networks whose declarations come in another order.
    turned = "(declare-network f (declare-output Y real []) (declare-input X real [2]))"
    assert load(f"{VERSION}{turned}{BOX}(assert (<= Y 0))").status == "ready"
