# make demo   a restore from start to end on this machine, with figures
# make test   every test that this machine can run, a real vLLM included
# make check  lint, types, layering and the rules of the repository
# make docs   the site, in build/site; warnings are errors
# make env    .venv (the others make it when it is missing or out of date)
SHELL := /bin/bash
PY := .venv/bin/python
PYTEST_ARGS ?=
# Engines in one process, everything else in others (tests/conftest.py); 0: one after the other
WORKERS ?= 2

.PHONY: demo test check docs env clean

demo: env
	$(PY) -m scripts.demo

test: env
	$(PY) -m pytest -n $(WORKERS) $(PYTEST_ARGS)

check: env
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	$(PY) -m mypy
	PYTHONPATH=. .venv/bin/lint-imports
	$(PY) -m pytest -q tests/cpu/test_repo_rules.py

# An environment of its own: the site needs no vLLM.
.venv-docs/.ready: pyproject.toml
	$${PYTHON:-python3} -m venv .venv-docs
	.venv-docs/bin/pip install -qq --disable-pip-version-check -e '.[docs,gateway]'
	touch $@

docs: .venv-docs/.ready
	.venv-docs/bin/python -m scripts.generate_docs --check
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet --site-dir build/site

env:
	@scripts/setup_env.sh

clean:
	rm -rf .venv .venv-docs .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
