"""Reading instance lists and known answers."""

import gzip
import os
from pathlib import Path

import pytest

from stagecert.errors import ProblemError
from stagecert.verify.instances import read_lists


def written(folder, text, name="instances.csv"):
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_a_plain_list(tmp_path):
    path = written(tmp_path / "acas", "onnx/a.onnx,vnnlib/p.vnnlib,116\nb.onnx,q.vnnlib,0.5\n")
    first, second = read_lists([path])
    assert (first.set, first.model, first.property) == ("acas", "onnx/a.onnx", "vnnlib/p.vnnlib")
    assert first.model_path == tmp_path / "acas" / "onnx" / "a.onnx"
    assert (first.timeout, first.expected) == (116.0, None)
    assert (second.timeout, second.name()) == (0.5, "b q")


@pytest.mark.parametrize(
    "text",
    [
        "\ufeffa.onnx,p.vnnlib,5\r\n\r\nb.onnx,q.vnnlib,6\r\n",
        '# one\na.onnx,p.vnnlib,5\n  # two "\nb.onnx,q.vnnlib,6',
        '"a.onnx" , "p.vnnlib" ,"5"\n b.onnx ,q.vnnlib, 6 \n',
        "onnx,vnnlib,timeout\na.onnx,p.vnnlib,5\nb.onnx,q.vnnlib,6\n",
        "timeout,Property,MODEL,comment\n5,p.vnnlib,a.onnx,x\n6,q.vnnlib,b.onnx,\n",
        "a.onnx,p.vnnlib,5,\nb.onnx,q.vnnlib,6,,\n",
    ],
)
def test_ways_to_write_the_same_list(tmp_path, text):
    found = read_lists([written(tmp_path, text)])
    assert [(one.model, one.property, one.timeout) for one in found] == [
        ("a.onnx", "p.vnnlib", 5.0),
        ("b.onnx", "q.vnnlib", 6.0),
    ]


def test_names_with_commas_and_quotation_marks(tmp_path):
    (one,) = read_lists([written(tmp_path, '"a,b.onnx","say ""p"".vnnlib",5\n')])
    assert (one.model, one.property) == ("a,b.onnx", 'say "p".vnnlib')


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no instances"),
        ("# nothing\n\n", "has no instances"),
        ("a.onnx,p.vnnlib,5\na.onnx\n", "line 2: there is no property"),
        ("\n,p.vnnlib,5\n", "line 2: there is no model"),
        ("a.onnx,p.vnnlib,soon\n", "line 1: the timeout must be a positive .* not 'soon'"),
        ("a.onnx,p.vnnlib,-1\n", "not '-1'"),
        ("a.onnx,p.vnnlib,nan\n", "not 'nan'"),
        ("a.onnx,p.vnnlib,inf\n", "not 'inf'"),
        ("a.onnx,p.vnnlib\n", "line 1: there is no timeout"),
        ('a.onnx,"p.vnnlib,5\n', "line 1: a quotation mark is not closed"),
        ("a.onnx,p.vnnlib,5,maybe\n", "line 1: the expected answer must be .* not 'maybe'"),
        ("a.onnx,p.vnnlib,5,sat,more\n", "line 1: 5 columns"),
        (b"\x80\x81\xff", "it is not text"),
        # Once an error of the program, not of the list.
        ("a.onnx," + "p" * 140_000 + ",5\n", "line 1 is no line of a CSV file: field larger"),
    ],
)
def test_errors_name_the_line(tmp_path, text, message):
    with pytest.raises(ProblemError, match=message) as error:
        read_lists([written(tmp_path, text)])
    assert "instances.csv" in str(error.value)


def test_a_missing_list(tmp_path):
    with pytest.raises(ProblemError, match=r"nowhere\.csv cannot be read: No such file"):
        read_lists([tmp_path / "nowhere.csv"])


def test_a_timeout_for_all(tmp_path):
    path = written(tmp_path, "a.onnx,p.vnnlib\nb.onnx,q.vnnlib,6\n")
    assert [one.timeout for one in read_lists([path], timeout=2)] == [2, 2]
    with pytest.raises(ProblemError, match="timeout must be a positive"):
        read_lists([path], timeout=0)


def test_packed_files_are_found(tmp_path):
    path = written(tmp_path, "a.onnx,p.vnnlib,5\nb.onnx,q.vnnlib,5\n")
    (tmp_path / "a.onnx.gz").write_bytes(gzip.compress(b"model"))
    (tmp_path / "p.vnnlib").touch()
    (tmp_path / "p.vnnlib.gz").touch()
    first, second = read_lists([path])
    assert isinstance(first.model_path, Path)
    assert isinstance(second.model_path, Path)
    assert first.model_path.name == "a.onnx.gz"
    # The plain file is preferred, and what is not there at all keeps its name.
    assert first.property_path.name == "p.vnnlib"
    assert second.model_path.name == "b.onnx"


def test_answers_are_matched_by_file(tmp_path, monkeypatch):
    path = written(
        tmp_path, "./x/a.onnx,p.vnnlib,5,unsat\nb.onnx,p.vnnlib,5,sat\nc.onnx,p.vnnlib,5\n"
    )
    answers = written(
        tmp_path / "x",
        "onnx,vnnlib,expected,sources\na.onnx,../p.vnnlib.gz,sat,tools\n../c.onnx,../p.vnnlib,conflict,",
        "known.csv",
    )
    monkeypatch.chdir(tmp_path)
    relative = os.path.relpath(path, tmp_path)
    for one in (path, relative):
        found = read_lists([one], answers=[answers])
        assert [instance.expected for instance in found] == ["sat", "sat", "conflict"]
    with pytest.raises(ProblemError, match="line 1: a heading is needed"):
        read_lists([path], answers=[path])


def test_samples_are_spread_over_each_list(tmp_path):
    lines = "".join(f"m{k}.onnx,p.vnnlib,5\n" for k in range(11))
    paths = [written(tmp_path / name, lines) for name in ("one", "two")]
    found = read_lists(paths, limit=3)
    assert [(i.set, i.model) for i in found] == [
        (name, f"m{k}.onnx") for name in ("one", "two") for k in (0, 5, 10)
    ]
    assert len(read_lists(paths, limit=50)) == 22
    with pytest.raises(ProblemError, match="limit must be at least 1"):
        read_lists(paths, limit=0)


def test_names_of_lists(tmp_path):
    line = "a.onnx,p.vnnlib,5\n"
    one = written(tmp_path / "x", line)
    two = written(tmp_path / "x", line, "hard.csv")
    three = written(tmp_path / "y", line, "hard.csv")
    assert [i.set for i in read_lists([one, two])] == ["x", "hard"]
    assert len({i.set for i in read_lists([one, two, three])}) == 3
    with pytest.raises(ProblemError, match="is given twice"):
        read_lists([one, one])


def test_a_folder_that_the_set_lacks(tmp_path):
    # monotonic_acasxu says onnx/original/X.onnx; the file is onnx/X.onnx.gz.
    for place in ("onnx/f.onnx.gz", "onnx/a/g.onnx", "onnx/b/g.onnx", "h.onnx"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_bytes(b"")
    lines = "".join(f"onnx/original/{name}.onnx,p.vnnlib,5\n" for name in "fgh")
    f, g, h = read_lists([written(tmp_path, lines)])
    assert f.model_path == tmp_path / "onnx" / "f.onnx.gz"
    # Two of that name, or one that is elsewhere: it is missing, and is said to be.
    assert g.model_path == tmp_path / "onnx" / "original" / "g.onnx"
    assert h.model_path == tmp_path / "onnx" / "original" / "h.onnx"
