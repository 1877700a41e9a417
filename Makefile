# make demo | test | check | comfyui. Everything runs in .venv, which is made and filled when it is missing.
# Another Python: make test PYTHON=python3.12. An environment of your own: make test PY=python.

PYTHON ?= python3
VENV ?= .venv

ifeq ($(origin PY), undefined)
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
TOOLS := $(VENV)/.tools
endif

.PHONY: demo test check comfyui

# Plain MAR and FastHybrid on one seed, side by side, in compare.png.
demo: $(READY)
	$(PY) -m fastar_nodes compare --model demo --label cat --seed 7 --samplers mar,fasthybrid --out compare.png

test: $(READY)
	$(PY) -m pytest

# Rules and types. mypy sees the checkout under the package's name, whatever its folder is called.
check: $(READY) $(TOOLS)
	$(PY) -m ruff check .
	mkdir -p .mypy_path && ln -sfn "$(CURDIR)" .mypy_path/fastar_nodes
	cd .mypy_path && $(if $(findstring /,$(PY)),"$(abspath $(PY))",$(PY)) -m mypy --config-file ../pyproject.toml -p fastar_nodes

# Only the tests in a real ComfyUI; they say how to point at one.
comfyui: $(READY)
	$(PY) -m pytest tests/comfyui -rs

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --editable ".[standalone,test]"
	touch $@

$(VENV)/.tools: $(VENV)/.ready
	$(VENV)/bin/python -m pip install --quiet --editable ".[dev]"
	touch $@
