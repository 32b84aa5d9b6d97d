# The two commands of the README are `make demo` and `make test`; both set up all that they need.

VENV   := .venv
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip install -q --disable-pip-version-check -c constraints.txt
RUNS   := runs
SEED   := 1

.DELETE_ON_ERROR:
.PHONY: demo test lint types parity browser soak clean

$(VENV)/bin/python:
	python3 -m venv $(VENV)

# One stamp for each set of packages, made anew when what it was made from changes.
$(VENV)/demo.stamp: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) -e '.[train,report]'
	touch $@

$(VENV)/dev.stamp: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) -e '.[dev]'
	touch $@

# mypy does not see the folder mapping of an editable install, so it reads a tree of links.
types: $(VENV)/dev.stamp
	rm -rf build/types && mkdir -p build/types/moe_audit
	ln -s $(CURDIR)/audit/* build/types/moe_audit/
	ln -s $(CURDIR)/hooks $(CURDIR)/thresholds $(CURDIR)/reports build/types/moe_audit/
	ln -s $(CURDIR)/moe_trainer build/types/
	cd build/types && $(CURDIR)/$(PY) -m mypy --config-file $(CURDIR)/pyproject.toml -p moe_audit -p moe_trainer

lint: $(VENV)/dev.stamp
	$(PY) -m ruff check . && $(PY) -m ruff format --check .
