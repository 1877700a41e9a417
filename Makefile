# make demo | test | test-all | check | texts | comfyui | soak | gpu | figures. Commands run in .venv, which is created and filled if it is missing.
# Another Python: make test PYTHON=python3.12. An existing environment: make test PY=python.

PYTHON ?= python3
VENV ?= .venv

ifeq ($(origin PY), undefined)
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
TOOLS := $(VENV)/.tools
endif

.PHONY: demo test test-all check texts comfyui soak gpu figures

# In compare.png: exact parallel decoding, whose image is identical in a quarter of the passes, then FastHybrid and LazyMAR beside MAR.
demo: $(READY)
	$(PY) -m fastar_nodes compare --model demo --label cat --seed 1 --samplers llamagen,llamagen:parallel,mar,fasthybrid,lazymar \
	  --set llamagen:parallel.parallel=16 --set preset=balanced --out compare.png

test: $(READY)
	$(PY) -m pytest

# The tests that `make test` leaves out, after those that it runs.
test-all: test
	$(PY) -m pytest -m slow

# Lint and types. mypy needs the checkout under the name of the package.
check: $(READY) $(TOOLS)
	$(PY) -m ruff check .
	mkdir -p .mypy_path && ln -sfn "$(CURDIR)" .mypy_path/fastar_nodes
	cd .mypy_path && $(if $(findstring /,$(PY)),"$(abspath $(PY))",$(PY)) -m mypy --config-file ../pyproject.toml -p fastar_nodes

# What is made of the texts and widgets of nodes and settings: help pages, docs/settings.md, locales, the record of widgets.
texts: $(READY)
	$(PY) -m fastar_nodes.lab help-pages
	$(PY) -m fastar_nodes.lab translate
	$(PY) tests/nodes/test_schemas.py

# Only the tests in a real ComfyUI; see "Tests" in CONTRIBUTING.md.
comfyui: $(READY)
	$(PY) -m pytest -m "" -rs tests/comfyui

# A real ComfyUI for 20 minutes: 200 prompts with cancels and bad values, then 500 hostile values. Linux only.
soak: $(READY)
	FASTAR_SOAK=1 $(PY) -m pytest -m "" -rs -s tests/comfyui/test_load.py

# Every sampler on a CUDA device with each speed, in at most ten minutes; run it again for what was cut. PARTS=mar,par:
# those.
gpu: $(READY)
	$(PY) -m fastar_nodes.lab gpu --out gpu-results $(subst $(comma), ,$(PARTS))

comma := ,

# All tables and plots of the docs, or ONLY=mar,par; about 90 minutes of one idle core.
figures: $(READY)
	$(PY) -m fastar_nodes.lab figures $(ONLY)

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --editable ".[standalone,test]"
	touch $@

$(VENV)/.tools: $(VENV)/.ready
	$(VENV)/bin/python -m pip install --quiet --editable ".[dev]"
	touch $@
