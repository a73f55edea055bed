# make demo   a restore from start to end on this machine, with figures
# make test   every test that this machine can run, a real vLLM included
# make check  lint, types, layering and the rules of the repository
# make env    .venv (the others make it when it is missing or out of date)
SHELL := /bin/bash
PY := .venv/bin/python
PYTEST_ARGS ?=

.PHONY: demo test check env clean

demo: env
	$(PY) -m scripts.demo

test: env
	$(PY) -m pytest $(PYTEST_ARGS)

check: env
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	$(PY) -m mypy
	PYTHONPATH=. .venv/bin/lint-imports
	$(PY) -m pytest -q tests/cpu/test_repo_rules.py

env:
	@scripts/setup_env.sh

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
