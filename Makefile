# From a bare machine with make and Python >= 3.11:
#
#   make demo        run the demo (runtime dependencies only)
#   make test        run the tests that must pass before a merge
#   make test-all    run all tests, the slow ones too, on new random examples
#   make lint        ruff (lint and format) and pyright, which is strict about the checker
#   make docs        build the documentation into site/
#   make pictures    make the pictures of the documentation again
#   make dist        build the packages into dist/, and try the wheel in an empty environment
#   make benchmark   run the benchmarks
#   make paper       run the paper's experiments on 20 images (needs data, see docs/paper.md)
#   make format      let ruff fix and format the code
#   make clean       remove .venv and everything built
#
# Each target first installs what it needs into .venv, once, and again when pyproject.toml changes.
# Another interpreter: `make test PYTHON=python3.12`. It is used when .venv is created.

PYTHON ?= python3
PYTEST_ARGS ?= -q -n 2 --dist worksteal -m "not slow"

# All paths are relative, so a checkout path with spaces works.
VENV := .venv
PY := $(VENV)/bin/python
PIP_INSTALL := $(PY) -m pip install --quiet --disable-pip-version-check

.PHONY: demo test test-all lint ruff docs pictures dist benchmark paper format clean
.DEFAULT_GOAL := demo
.DELETE_ON_ERROR:
# pip must not run twice at once in one environment, so `make -j` is serialised.
.NOTPARALLEL:

demo: $(VENV)/.installed
	$(VENV)/bin/stagecert demo

# Most of the time goes into compiling small programs that run for milliseconds. With these, XLA
# compiles in half the time, for slower programs; `make test-all` compiles as for users. XLA ends
# with an error at flags that it does not know: remove those that a new version has given up.
QUICK_COMPILER := JAX_DISABLE_MOST_OPTIMIZATIONS=1 \
  XLA_FLAGS="$$XLA_FLAGS --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"

# The same random examples in every run, so that what fails is what was changed.
test: $(VENV)/.installed-test
	$(QUICK_COMPILER) STAGECERT_EXAMPLES=$${STAGECERT_EXAMPLES:-same} $(PY) -m pytest $(PYTEST_ARGS)

test-all: $(VENV)/.installed-test
	$(PY) -m pytest -q -n 2 --dist worksteal

lint: ruff
	$(PY) -m pyright --pythonpath $(PY)
	$(PY) -m pyright --pythonpath $(PY) -p checker

ruff: $(VENV)/.installed-lint
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

# The variable silences the theme's banner about its end of life (May 2027).
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

# Pictures are committed: making them takes minutes, and some need data.
pictures: $(VENV)/.installed-test
	$(PY) scripts/draw_pictures.py $(PICTURES)

# The wheel is built from the source distribution, so both are tried. The checker alone, in another
# environment, must accept all proofs of the demo, and reject a forged one (with status 1) that
# claims what is not so.
dist: $(VENV)/.installed-dist
	rm -rf dist build
	$(PY) -m build --outdir dist .
	$(PY) -m build --wheel --outdir dist checker
	$(PY) -m venv build/empty
	build/empty/bin/python -m pip install --quiet --disable-pip-version-check dist/stagecert-*.whl
	build/empty/bin/stagecert --version
	build/empty/bin/stagecert demo --out build/demo
	for proof in build/demo/*.cert; do \
	  build/empty/bin/stagecert check build/demo/digits.onnx "$${proof%.cert}.vnnlib" "$$proof" || exit 1; \
	done
	$(PY) -m venv build/sceptic
	build/sceptic/bin/python -m pip install --quiet --disable-pip-version-check dist/stagecert_check-*.whl
	for proof in build/demo/*.cert; do \
	  build/sceptic/bin/stagecert-check build/demo/digits.onnx "$${proof%.cert}.vnnlib" "$$proof" || exit 1; \
	done
	build/sceptic/bin/python scripts/forge_certificate.py \
	  build/demo/a-small-radius.cert build/demo/d-violated.vnnlib build/forged.cert
	build/sceptic/bin/stagecert-check \
	  build/demo/digits.onnx build/demo/d-violated.vnnlib build/forged.cert; test $$? -eq 1
	@ls -l dist

benchmark: $(VENV)/.installed-test
	$(PY) -m benchmarks.core

# More options: `make paper PAPER_ARGS="--images 100"`.
paper: $(VENV)/.installed-paper
	$(PY) -m benchmarks.paper $(PAPER_ARGS)

format: $(VENV)/.installed-lint
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:
	rm -rf $(VENV) site dist build .pytest_cache .ruff_cache .hypothesis

# One stamp for the runtime install and one per extra, all in the same environment. An install with
# an extra covers the runtime dependencies, so it renews that stamp too.
$(VENV)/.installed: pyproject.toml | $(VENV)/pyvenv.cfg
	@echo "Installing stagecert into $(VENV) ..."
	@$(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/.installed-%: pyproject.toml | $(VENV)/pyvenv.cfg
	@echo "Installing stagecert[$*] into $(VENV) ..."
	@$(PIP_INSTALL) --editable ".[$*]"
	@touch $(VENV)/.installed $@

$(VENV)/pyvenv.cfg:
	@command -v "$(PYTHON)" >/dev/null || { \
	  echo "error: '$(PYTHON)' not found; stagecert needs Python 3.11 or newer." >&2; \
	  echo "Name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: stagecert needs Python 3.11 or newer; '$(PYTHON)' is $$("$(PYTHON)" --version 2>&1)." >&2; \
	  echo "Name another: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -m venv $(VENV) || { rm -f $@; \
	  echo "error: '$(PYTHON) -m venv' failed (on Debian and Ubuntu: install python3-venv)." >&2; \
	  exit 1; }
