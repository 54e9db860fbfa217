# make demo | test | lint | bench | docs | clean. Each works alone, from a fresh clone, with any Python >= 3.11.
.PHONY: demo test lint bench docs clean
.DELETE_ON_ERROR:
# Packages are compiled to bytecode as they are imported; most of what is installed never is. Containers often set this.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
# The first Python here that is new enough. Run, not only found: pyenv's shims exist for versions that don't run.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)

# Plans a transformer that one device can't hold for four fast and four slow GPUs, and a small one that runs here: on eight
# host devices, unevenly, every output beside one device's. Ends with a picture of each.
demo: .venv
	@mkdir -p out
	$(BIN)/python -m hapsynth search examples/transformer.py --cluster examples/clusters/mixed8_100gbit.toml --plan out/small.json
	$(BIN)/python -m hapsynth run examples/transformer.py --plan out/small.json
	$(BIN)/python -m hapsynth view out/small.json examples/transformer.py -o out/small.html
	$(BIN)/python -m hapsynth search examples/transformer.py:six_layers --cluster examples/clusters/mixed8.toml --plan out/plan.json
	$(BIN)/python -m hapsynth view out/plan.json examples/transformer.py:six_layers -o out/plan.html

test: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: .venv
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/lint-imports

bench: .venv
	@mkdir -p out
	for file in benchmarks/bench_*.py; do $(BIN)/python $$file || exit 1; done

docs: .venv
	$(BIN)/mkdocs build --strict --site-dir out/site

# The folder is made once; the stamp says that what pyproject.toml asks for is in it.
.venv: .venv/.installed

.venv/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -e '.[test,docs]'
	@touch $@

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "make: no Python >= 3.11 here; install one, or run make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv .venv

clean:
	rm -rf out build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .venv .venv313 .venvaot
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
