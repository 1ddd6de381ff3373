# make demo     watch changes go from MongoDB to gold tables
# make test     run the tests
# make lint     ruff (format and lint) and mypy
# make journeys run the long tests: kills, spark-submit, the demo played twice, rebuilds
# make bench    measure it on this machine
# make clean    remove everything that these created, except the demo's data
#
# Each creates the environment in .venv first. PYTHON=… selects another Python than python3.

.PHONY: help demo test lint journeys bench clean
.DEFAULT_GOAL := help

PYTEST := env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -m pytest# tests start dozens of processes: each would compile all modules

help:
	@sed -n 's/^# //p' Makefile

demo:
	@PYTHON="$(PYTHON)" .ci/environment demo
	@.venv/bin/medallion demo $(ARGS)

test:
	@PYTHON="$(PYTHON)" .ci/environment test
	@$(PYTEST) $(ARGS)

lint:
	@PYTHON="$(PYTHON)" .ci/environment test
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check --quiet .
	@.venv/bin/mypy --no-error-summary

journeys:
	@PYTHON="$(PYTHON)" .ci/environment test
	@$(PYTEST) -m journey --numprocesses=0 $(ARGS)

bench:
	@PYTHON="$(PYTHON)" .ci/environment test
	@.venv/bin/python -m bench $(ARGS)

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .hypothesis spark-warehouse
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
