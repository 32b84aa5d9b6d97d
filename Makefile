# The two commands of the README are `make demo` and `make test`; both set up all that they need.

VENV    := .venv
PY      := $(VENV)/bin/python
PIP     := -m pip install -q --disable-pip-version-check -c constraints.txt
PARITY  := .venv-parity
PARITY4 := .venv-parity4
RUNS    := runs
SEED    := 1

.DELETE_ON_ERROR:
.PHONY: demo test lint types unit distributed parity browser soak clean

# --- set-up: a stamp for each set of packages, made anew when what it was made from changes

$(VENV)/bin/python:
	python3 -m venv $(VENV)

$(VENV)/demo.stamp: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PY) $(PIP) -e '.[train,report]'
	touch $@

$(VENV)/dev.stamp: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PY) $(PIP) -e '.[dev]'
	touch $@

$(PARITY)/stamp: pyproject.toml constraints.txt
	python3 -m venv $(PARITY)
	$(PARITY)/bin/python $(PIP) -e '.[train,parity]' pytest hypothesis
	touch $@

# transformers 4.57 and 5 exclude each other
$(PARITY4)/stamp: pyproject.toml tests/parity/constraints-transformers4.txt
	python3 -m venv $(PARITY4)
	$(PARITY4)/bin/python -m pip install -q --disable-pip-version-check -c tests/parity/constraints-transformers4.txt \
		-e . torch 'transformers<5' accelerate datasets pytest hypothesis
	touch $@

# --- demo: a healthy and a sick run on the same real text, judged by the same policy

demo: $(VENV)/demo.stamp
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" bash examples/demo.sh $(RUNS) $(SEED)

# --- tests

test: lint types unit

lint: $(VENV)/dev.stamp
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

# mypy does not see the folder mapping of an editable install, so it reads a tree of links.
types: $(VENV)/dev.stamp
	rm -rf build/types && mkdir -p build/types/moe_audit
	ln -s $(CURDIR)/audit/* build/types/moe_audit/
	ln -s $(CURDIR)/hooks $(CURDIR)/thresholds $(CURDIR)/reports build/types/moe_audit/
	ln -s $(CURDIR)/moe_trainer build/types/
	cd build/types && $(CURDIR)/$(PY) -m mypy --config-file $(CURDIR)/pyproject.toml -p moe_audit -p moe_trainer

unit: $(VENV)/dev.stamp
	$(PY) -m pytest -n 2 -m 'not parity and not distributed and not browser'

distributed: $(VENV)/dev.stamp
	$(PY) -m pytest -m distributed

parity: $(PARITY)/stamp $(PARITY4)/stamp
	$(PARITY)/bin/python -m pytest -m parity tests/parity
	$(PARITY4)/bin/python -m pytest -m parity tests/parity/test_adapter_transformers_4.py tests/parity/test_callbacks.py \
		tests/parity/test_more_callbacks.py

browser: $(VENV)/dev.stamp
	command -v chromium >/dev/null || { apt-get update -q && apt-get install -y -q chromium chromium-driver; }
	$(PY) -m pytest -m browser

# The kill, lock and soak tests at their full counts; the result goes into benchmarks/LOG.md.
soak: $(VENV)/dev.stamp
	$(PY) -m pytest --soak 50 -m 'not parity and not browser' tests/hooks tests/audit

clean:
	rm -rf $(VENV) $(PARITY) $(PARITY4) build runs .mypy_cache .ruff_cache
