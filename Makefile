# Each target creates .venv and installs what it needs; a second call finds it there.
PYTHON ?= $(shell for python in python3 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null \
	&& echo $$python && break; done)
VENV := .venv
BIN := $(VENV)/bin
# Making networks needs root; what runs in them does not.
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Every process would compile the sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-slow lint docs notebooks resolve rooms concepts tables bench cluster cluster-down clean

demo: $(VENV)/installed
	$(BIN)/concord demo

test: $(VENV)/installed-dev
	$(BIN)/pytest --durations=10

test-slow: $(VENV)/installed-dev
	$(BIN)/pytest -m slow --numprocesses 0

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

resolve: $(VENV)/installed-dev
	$(BIN)/python tests/system/resolution_checks.py

rooms: $(VENV)/installed-dev
	$(BIN)/python docs/rooms.py

concepts: $(VENV)/installed
	$(BIN)/python docs/concepts.py

notebooks: $(VENV)/installed-dev
	$(BIN)/python docs/notebooks.py

tables: $(VENV)/installed
	$(BIN)/python docs/documents.py docs/results README.md docs/*.md

bench: $(VENV)/installed
	$(BIN)/concord bench

cluster: $(VENV)/installed-server
	$(SUDO) $(abspath $(BIN))/python cluster/local/cluster.py up

cluster-down: $(BIN)/python
	$(SUDO) $(abspath $(BIN))/python cluster/local/cluster.py down

clean:
	rm -rf $(VENV) dist site

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Concord needs Python 3.11 or 3.12: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[coinrun]'
	@touch $@

$(VENV)/installed-server: $(VENV)/installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[coinrun,server]'
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[coinrun,box2d,mujoco,flights,images,dev,docs]'
	@touch $@
