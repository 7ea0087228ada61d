# Two commands on a fresh clone: `make train` and `make test`.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
JOB := docs/examples/digits/job.yaml

# Ranks share the cores: one thread each. What Prefect keeps stays inside the project.
export OMP_NUM_THREADS := 1
export PREFECT_HOME := $(CURDIR)/.prefect
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export DO_NOT_TRACK := 1

.DEFAULT_GOAL := help
.PHONY: help train test check laws format clean

help:  ## show this list
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 16

train: $(STAMP)  ## train the real example as a Prefect flow; ARGS="--run NAME" and the like are passed on
	$(BIN)/midstride train $(JOB) $(ARGS)

test: check  ## what must pass: check, then every test; the laws in a seeded pairwise cover
	$(BIN)/python -m pytest $(ARGS)

check: $(STAMP)  ## lint, format, types, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

laws: $(STAMP)  ## walk the whole product of every law's axes; hours, not minutes
	$(BIN)/python -m pytest tests/laws --laws=all $(ARGS)

format: $(STAMP)  ## rewrite the sources the way `make check` wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the environment and every cache; runs stay
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .prefect

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[examples]' --group dev
	touch $@
