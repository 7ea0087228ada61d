# Two commands on a fresh clone: `make train` and `make test`.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
TRAINS := .venv/.trains
COMPILED := .venv/.compiled
HOROVOD := .venv/.horovod
AIRFLOW := .cache/airflow
RAY := .cache/ray
XLA := .cache/xla
LIBRARIES := .cache/libraries
TORCH ?= 2.10.0
OTHER_TORCH = .cache/torch-$(TORCH)
OLDEST := .cache/oldest
JOB := docs/examples/digits/job.yaml
EXAMPLES = -c constraints.txt -e '.[examples]'
PACKAGES = $(EXAMPLES) --group dev --group docs
GPU_PACKAGES = $(PYTHON) -m pip install --quiet --disable-pip-version-check --no-index --no-deps --upgrade --find-links build/wheelhouse --target build/gpu pydantic pydantic-core annotated-types typing-inspection typing-extensions xxhash

# Ranks share the cores: one thread each. What Prefect keeps stays inside the project.
export OMP_NUM_THREADS := 1
# Hundreds of processes start from here: what Python compiles is kept.
unexport PYTHONDONTWRITEBYTECODE
export PREFECT_HOME := $(CURDIR)/.prefect
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export DO_NOT_TRACK := 1

.DEFAULT_GOAL := help
.PHONY: help train test tests test-all check lint types mypy pyright docs laws mutants soak soak-damage soak-nodes test-airflow test-ui test-gpu test-libraries test-lightning test-oldest test-ray test-torch test-xla bench-checks bench-commit bench-data bench-gpu bench-lanes bench-memory bench-nodes bench-overhead bench-pipeline bench-restart bench-s3 bench-snapshots bench-steps horovod format clean

help:  ## show this list
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)/  make \1\t\2/' | expand -t 22

train: $(or $(wildcard $(STAMP)),$(TRAINS))  ## train the real example as a Prefect flow; ARGS="--run NAME" and the like are passed on
	$(BIN)/midstride train $(JOB) $(ARGS)

test: $(HOROVOD)  ## what must pass; ARGS="-m fast" while you edit, LOAD=8 beside 8 busy loops
	$(MAKE) --no-print-directory lint
	$(MAKE) --no-print-directory --jobs=3 types tests

# Tests wait a lot, and leave the type checkers the time.
types:
	$(MAKE) --no-print-directory --output-sync mypy pyright

tests: $(COMPILED)
	$(if $(LOAD),$(BIN)/python tests/support/load.py $(LOAD)) $(BIN)/python -m pytest --numprocesses=auto --durations-file=build/durations.txt $(ARGS)

test-all: check $(HOROVOD)  ## everything: whole laws on a disk, soak, browser, Airflow, xla; before a release
	$(BIN)/python -m pytest --numprocesses=auto --laws=all --disk --ui --durations-file=build/durations-all.txt
	$(MAKE) soak test-airflow test-ray test-xla

test-ui: $(STAMP)  ## Retry, Cancel and deaths of a deployed run, in a real browser (chromium); pictures for the docs
	$(BIN)/python -m pytest tests/ui --ui --pictures=docs/images $(ARGS)

check: $(STAMP)  ## lint, format, types by mypy and pyright, import contracts
	$(MAKE) --no-print-directory --jobs=2 lint types

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

mypy:
	$(BIN)/mypy

pyright:
	rm -rf build/pyright && mkdir -p build/pyright/midstride && cp -r engine tasks flows build/pyright/midstride
	$(BIN)/basedpyright

docs: $(STAMP)  ## build the documentation in build/site; ARGS="serve" shows it while you write
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs $(or $(ARGS),build --quiet) --strict

laws: $(STAMP) $(HOROVOD)  ## the whole product of every law's axes, after a change of what is resumed
	$(BIN)/python -m pytest --numprocesses=auto tests/laws --laws=all $(ARGS)

horovod: $(HOROVOD)  ## install Horovod; it is compiled once, then kept in the cache folder

mutants: $(STAMP) $(HOROVOD)  ## plant known bugs in a copy, one at a time: which do the tests not see? ARGS="-k lease" runs some
	PYTHONPATH=tests $(BIN)/python -m mutants $(ARGS)

soak: $(STAMP)  ## kill one run of the real example 20 times and compare; ARGS="--kills 200 --seed 3"
	PYTHONPATH=tests $(BIN)/python -m soak.soak $(ARGS)

soak-nodes: $(STAMP)  ## kill, cut off, freeze and add the machines of runs in lanes for 10 minutes; ARGS="--minutes 60 --seed 3"
	PYTHONPATH=tests $(BIN)/python -m soak.nodes $(ARGS)

soak-damage: $(STAMP)  ## damage 500 files of runs, one at a time, and finish each run; ARGS="--cases 5000 --seed 500"
	PYTHONPATH=tests $(BIN)/python -m soak.damage $(ARGS)

test-airflow: $(STAMP) $(AIRFLOW)/.installed  ## train by the provider's operators under a real Airflow; it has an environment of its own
	AIRFLOW=$(CURDIR)/$(AIRFLOW)/bin/airflow $(BIN)/python -m pytest deploy/airflow $(ARGS)

test-xla: $(XLA)/.installed  ## the laws of strategy xla on torch_xla's CPU device; it has an environment of its own
	PJRT_DEVICE=CPU $(XLA)/bin/python -m pytest tests/laws tests/distributed/test_xla.py -k xla --timeout=1800 $(ARGS)

test-ray: $(RAY)/.installed  ## nodes from a real Ray, one of which is lost; ray is kept beside the environment
	PYTHONPATH=$(CURDIR)/$(RAY) RAY_USAGE_STATS_ENABLED=0 $(BIN)/python -m pytest tests/distributed/test_ray.py $(ARGS)

test-libraries: $(LIBRARIES)/.installed  ## programs with libraries around PyTorch (peft, timm, darts and others), killed and resumed; kept beside the environment
	PYTHONPATH=$(CURDIR)/$(LIBRARIES)/site-packages HF_HUB_OFFLINE=1 $(BIN)/python -m pytest tests/libraries $(ARGS)

test-lightning: $(STAMP)  ## Lightning's own tests on midstride's Trainer, with a count of reasons; LIGHTNING=path of a checkout
	cd $(LIGHTNING)/tests && PYTHONPATH=$(CURDIR)/tests/libraries $(CURDIR)/$(BIN)/python -m pytest -p lightning_shim -p no:cacheprovider -q --tb=short --continue-on-collection-errors --ignore=tests_pytorch/models/test_onnx.py --timeout=120 $(or $(ARGS),tests_pytorch/callbacks tests_pytorch/core tests_pytorch/loops tests_pytorch/models tests_pytorch/trainer)

test-torch: $(OTHER_TORCH)/.installed  ## units, worlds of processes and faults with another torch, in an environment of its own; TORCH=2.10.0
	$(OTHER_TORCH)/bin/python -m pytest --numprocesses=auto tests/unit tests/gpu tests/distributed tests/faults -k "not horovod and not every_launcher" $(ARGS)

test-oldest: $(OLDEST)/.installed  ## the real example with the oldest version that is taken of each dependency
	$(OLDEST)/bin/midstride train $(JOB) --set trainer.max_epochs=2 --set snapshots.url=$(CURDIR)/$(OLDEST)/runs

test-gpu:  ## what only a GPU shows; needs Python with torch, and build/wheelhouse (deploy/gpu/wheelhouse.py); PYTHON=... names it
	$(GPU_PACKAGES)
	PYTHONPATH=.types:build/gpu $(PYTHON) deploy/gpu/check.py $(ARGS)

bench-gpu:  ## what the engine costs on a GPU: steps, snapshots, memory; needs what test-gpu needs
	$(GPU_PACKAGES)
	PYTHONPATH=.types:build/gpu $(PYTHON) deploy/gpu/bench.py $(ARGS)

bench-snapshots: $(STAMP)  ## what a snapshot costs, beside torch.save and torch.distributed.checkpoint
	PYTHONPATH=tests $(BIN)/python -m bench.snapshots $(ARGS)
	PYTHONPATH=tests $(BIN)/python -m bench.many_tensors

bench-steps: $(STAMP)  ## what the engine adds to a training step, beside a bare loop
	PYTHONPATH=tests $(BIN)/python -m bench.steps $(ARGS)

bench-checks: $(STAMP)  ## what `verify_every` costs: a step executed twice, beside those around it
	PYTHONPATH=tests $(BIN)/python -m bench.checks $(ARGS)

bench-lanes: $(STAMP)  ## what adding up in lanes costs, beside DistributedDataParallel
	$(BIN)/python tests/bench/lanes.py $(ARGS)

bench-data: $(STAMP)  ## what reading exactly costs, beside a plain DataLoader
	$(BIN)/python tests/bench/data.py $(ARGS)

bench-nodes: $(STAMP)  ## from the loss of a machine to the next round and its first step; needs root
	PYTHONPATH=tests $(BIN)/python -m bench.nodes $(ARGS)

bench-overhead: $(STAMP)  ## what the orchestration costs, beside `midstride fit` on the same job
	PYTHONPATH=tests $(BIN)/python -m bench.overhead $(ARGS)

bench-memory: $(STAMP)  ## what a rank holds under ddp, sharded and fully_sharded
	$(BIN)/python tests/bench/memory.py $(ARGS)

bench-commit: $(STAMP)  ## what a commit of up to 1,024 ranks takes, simulated by threads
	$(BIN)/python tests/bench/commit.py $(ARGS)

bench-pipeline: $(STAMP)  ## memory of each stage, with and without balancing
	$(BIN)/python tests/bench/pipeline.py $(ARGS)

bench-restart: $(STAMP)  ## from the death of a rank to the first new step, part by part
	PYTHONPATH=tests $(BIN)/python -m bench.restart $(ARGS)

bench-s3: $(STAMP)  ## what a large file on S3 costs, beside s3fs and boto3, on a server of its own
	PYTHONPATH=tests $(BIN)/python -m bench.s3 $(ARGS)

format: $(STAMP)  ## rewrite the sources the way `make check` wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the environment and every cache; runs stay
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .prefect

define install
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps -c constraints.txt pip torch uv
	$(BIN)/uv pip install --quiet $(1) || $(BIN)/python -m pip install --quiet --no-compile $(1)
endef

# uv takes seconds where pip takes a minute. torch is pip's: a CPU build may lie where only pip is told to look, and so
# may the rest. Compiling all of 200 packages would take longer than installing them: Python compiles what is imported.
$(STAMP): pyproject.toml constraints.txt tests/support/seaweed.txt
	$(call install,$(PACKAGES))
	$(BIN)/python -m pip install --quiet --no-deps --require-hashes -r tests/support/seaweed.txt
	touch $@

# Training needs none of the tools for tests and documents.
$(TRAINS): pyproject.toml constraints.txt
	$(call install,$(EXAMPLES))
	touch $@

# Collecting the tests imports what each of their processes would else compile for itself; what fails, they say.
$(COMPILED): $(STAMP)
	$(BIN)/python -m pytest --numprocesses=0 --collect-only --quiet --quiet > /dev/null || true
	touch $@

$(AIRFLOW)/.installed: deploy/airflow/requirements.txt deploy/airflow/pyproject.toml
	$(PYTHON) -m venv $(AIRFLOW)
	$(AIRFLOW)/bin/pip install --quiet --disable-pip-version-check -r $< -e deploy/airflow
	touch $@

$(RAY)/.installed: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(RAY) -c constraints.txt ray msgpack
	touch $@

# The list has all that they need; what the environment has is that of the list of constraints.
$(LIBRARIES)/.installed: tests/libraries/requirements.txt $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(LIBRARIES)/site-packages -r $<
	touch $@

# Each torch says itself which triton and setuptools it takes.
$(OTHER_TORCH)/.installed: pyproject.toml constraints.txt tests/support/seaweed.txt
	$(PYTHON) -m venv $(OTHER_TORCH)
	grep -vE '^(torch|triton|setuptools)==' constraints.txt > $(OTHER_TORCH)/constraints.txt
	$(OTHER_TORCH)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(OTHER_TORCH)/bin/python -m pip install --quiet -c $(OTHER_TORCH)/constraints.txt -e '.[examples]' --group dev --group docs torch==$(TORCH) 'setuptools>=80'
	$(OTHER_TORCH)/bin/python -m pip install --quiet --no-deps --require-hashes -r tests/support/seaweed.txt
	touch $@

$(OLDEST)/.installed: pyproject.toml tests/support/oldest.py
	$(PYTHON) -m venv $(OLDEST)
	$(PYTHON) tests/support/oldest.py > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(OLDEST)/bin/python -m pip install --quiet -c $(OLDEST)/constraints.txt -e '.[examples]'
	touch $@

$(XLA)/.installed: deploy/xla/install.py constraints.txt
	$(PYTHON) -m venv $(XLA)
	$(XLA)/bin/python deploy/xla/install.py -c constraints.txt
	touch $@

$(HOROVOD): $(STAMP) deploy/horovod/install.py deploy/horovod/cxx17
	$(BIN)/python deploy/horovod/install.py -c constraints.txt
	touch $@
