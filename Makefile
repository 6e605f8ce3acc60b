# Each target creates .venv and installs what it needs; a second call finds it there.
PYTHON ?= $(shell for python in python3 python3.12 python3.11 python3.13 python3.14; do \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null \
	&& echo $$python && break; done)
VENV := .venv
BIN := $(VENV)/bin
# Making networks needs root; what runs in them does not.
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Every process would compile the sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-slow test-lowest lint docs notebooks resolve dist rooms concepts tables bench cluster cluster-down clean

demo: $(VENV)/installed
	$(BIN)/concord demo

test: $(VENV)/installed-dev
	$(BIN)/pytest --durations=10

test-slow: $(VENV)/installed-dev
	$(BIN)/pytest -m slow --numprocesses 0

# With the lowest versions that pyproject.toml allows, for which Python 3.11 and 3.12 have wheels. Left out are the tests
# against libraries that need newer ones, and a type of Parquet that pyarrow below 25 reads as plain bytes.
QUICK := tests/aggregation tests/gradients tests/environments tests/test_options.py tests/test_space.py \
	tests/system/test_private_interfaces.py $(patsubst %,--ignore=tests/%.py, \
	aggregation/test_weightings gradients/test_comparing_rules gradients/test_risk environments/test_datasets) \
	--deselect tests/environments/test_parquet.py::test_a_type_of_parquet_s_own_is_refused_too
test-lowest: $(VENV)-lowest/installed
	$(VENV)-lowest/bin/pytest $(QUICK)
	$(VENV)-lowest/bin/concord train synthetic --epochs 1 --workers 2 --output $(VENV)-lowest/output

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

resolve: $(VENV)/installed-dev
	$(BIN)/python tests/system/resolution_checks.py

# Wheel and sdist in dist/, checked, and tried in an empty environment.
dist: $(VENV)/installed-dev
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/twine check --strict dist/*
	$(BIN)/python tests/system/distribution_checks.py dist

rooms: $(VENV)/installed-dev
	$(BIN)/python docs/rooms.py

concepts: $(VENV)/installed
	$(BIN)/python docs/concepts.py

notebooks: $(VENV)/installed-dev
	$(BIN)/python docs/notebooks.py

tables: $(VENV)/installed
	$(BIN)/python docs/documents.py docs/results README.md docs/*.md

bench: $(VENV)/installed-dev
	$(BIN)/concord bench

cluster: $(VENV)/installed-server
	$(SUDO) $(abspath $(BIN))/python cluster/local/cluster.py up

cluster-down: $(BIN)/python
	$(SUDO) $(abspath $(BIN))/python cluster/local/cluster.py down

clean:
	rm -rf $(VENV) $(VENV)-lowest dist site

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Concord needs Python 3.11 to 3.14: make PYTHON=/path/to/python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	@touch $@

$(VENV)/installed-server: $(VENV)/installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[server]'
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[coinrun,box2d,mujoco,flights,images,dev,docs]'
	@touch $@

$(VENV)-lowest/installed: pyproject.toml | $(VENV)/installed-dev
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(VENV)-lowest
	$(BIN)/uv pip install --quiet --python $(VENV)-lowest/bin/python --resolution lowest-direct --editable .
	$(BIN)/uv pip install --quiet --python $(VENV)-lowest/bin/python --editable '.[test]'
	@touch $@
