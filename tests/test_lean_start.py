"""What is loaded before there is work to do: help and names were there only after JAX was."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import stagecert as sc

ROOT = Path(__file__).parent.parent
HEAVY = {"equinox", "flint", "jax", "jaxlib", "numpy", "onnx", "onnxruntime", "scipy"}
COMMANDS = ("demo", "inspect", "check", "verify", "robust", "sweep", "supports")


def python(*arguments, **environment):
    """What another Python prints."""
    found = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1", **environment},
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


def loaded_by(program: str) -> set[str]:
    """The packages that a program has loaded when it ends."""
    names = "import atexit, sys; atexit.register(lambda: print('\\n', *sys.modules))"
    return {name.split(".")[0] for name in python("-c", f"{names}\n{program}").split()}


def test_import_loads_no_jax():
    loaded = loaded_by("import stagecert; stagecert.__version__; dir(stagecert)")
    assert "stagecert" in loaded
    assert not loaded & HEAVY


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["--version"]])
def test_help_and_version_load_no_jax(arguments):
    loaded = loaded_by(
        f"import sys; sys.argv[1:] = {arguments}\nfrom stagecert.cli import main; main()"
    )
    assert "typer" in loaded
    assert not loaded & HEAVY


def test_help_of_all_commands_loads_no_jax():
    lines = ["from stagecert.cli import app"]
    for command in COMMANDS:
        lines += [f"print('{command}:', app(['{command}', '-h'], standalone_mode=False))"]
    loaded = loaded_by("\n".join(lines))
    assert {f"{command}:" for command in COMMANDS} <= loaded
    assert not loaded & HEAVY


def test_check_loads_no_jax(tmp_path):
    """Whoever checks certificates needs neither JAX nor anything of the search."""
    digits = ROOT / "src" / "stagecert" / "digits"
    files = [str(digits / "digits.onnx"), str(digits / "a-small-radius.vnnlib")]
    (tmp_path / "no.cert").write_bytes(b"not a certificate")
    arguments = ["check", *files, str(tmp_path / "no.cert")]
    loaded = loaded_by(
        f"from stagecert.cli import app\nprint('status', app({arguments}, standalone_mode=False))"
    )
    assert {"status", "2", "flint", "onnx"} <= loaded
    assert not loaded & {"equinox", "jax", "jaxlib", "scipy"}


def test_version_is_in_one_place():
    """Both packages, and both projects, have the checker's: there were two that could differ."""
    one = "src/stagecert_check/__init__.py"
    sources = sorted((ROOT / "src").rglob("*.py"))
    said = [path for path in sources if re.search(r"^__version__ = ", path.read_text(), re.M)]
    assert said == [ROOT / one]
    assert f'path = "{one}"' in (ROOT / "pyproject.toml").read_text()
    assert f'path = "../{one}"' in (ROOT / "checker" / "pyproject.toml").read_text()
    assert python("-m", "stagecert_check", "--version") == f"stagecert-check {sc.__version__}\n"


def test_module_is_the_program():
    assert python("-m", "stagecert", "--version") == f"stagecert {sc.__version__}\n"
    shown = python("-m", "stagecert", "-h")
    assert "Usage: stagecert " in shown  # not `python -m stagecert`, for which nothing is completed
    assert all(f" {command} " in shown for command in COMMANDS)


def test_shells_can_complete():
    asked = dict(COMP_WORDS="stagecert ve", COMP_CWORD="1", _STAGECERT_COMPLETE="complete_bash")
    assert python("-m", "stagecert", **asked).split() == ["verify"]


def test_every_name_is_there():
    for name in (*sc.__all__, *sc.PACKAGES):
        assert getattr(sc, name) is not None
        assert name in dir(sc)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = sc.nothing  # type: ignore[attr-defined]  (that it says so is right)
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        from stagecert import nothing  # type: ignore[attr-defined]  # noqa: F401


def test_names_of_functions_are_not_modules():
    """Loading a module puts it into its package, also where a function has its name."""
    program = """
import stagecert as sc
sc.Findings, sc.ProblemError       # load the modules check and errors
import stagecert.validate
from stagecert.check import check as one
print(sc.check is one, sc.check.__name__, sc.validate.__name__, type(sc.validate).__name__)
"""
    assert python("-c", program).split() == ["True", "check", "validate", "function"]


def test_missing_dependency_is_not_a_missing_name():
    program = """
import sys
sys.modules["equinox"] = None
import stagecert as sc
try:
    sc.Problem
except ModuleNotFoundError as error:
    print(error.name)
"""
    assert python("-c", program).split() == ["equinox"]


def test_type_checkers_see_the_same_names():
    tree = ast.parse((ROOT / "src/stagecert/__init__.py").read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen, packages = {}, []
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        assert node.module
        for name in node.names:
            if node.module == "stagecert":
                packages.append(name.name)
            else:
                seen[name.name] = node.module.removeprefix("stagecert.")
    assert seen == sc.HOMES
    assert tuple(packages) == sc.PACKAGES
    assert sorted({*seen, "networks"}) == sorted(sc.__all__)
    assert (ROOT / "src/stagecert/py.typed").exists()


@pytest.mark.parametrize("given", [None, "3"])
def test_products_use_one_thread_unless_told_otherwise(given, monkeypatch):
    """On a busy machine, the checker's products took up to sixty times as long with two."""
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    environment = {} if given is None else {"OPENBLAS_NUM_THREADS": given}
    script = (
        "import atexit, os, sys; sys.argv[1:] = ['--version']\n"
        "atexit.register(lambda: print(os.environ['OPENBLAS_NUM_THREADS'], 'numpy' in sys.modules))"
        "\nfrom stagecert.cli import main; main()"
    )
    threads, loaded = python("-c", script, **environment).split()[-2:]
    assert threads == (given or "1")
    assert loaded == "False"  # NumPy reads the variable when it is loaded
