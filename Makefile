# loopd: every command that a person or a script needs. `make help` lists them.
BIN := .venv/bin
MODEL := build/models/SmolLM2-135M-Instruct.Q4_1.gguf
SYSTEM_PACKAGES := python3 python3-venv libgomp1

.DEFAULT_GOAL := help
.PHONY: help setup chat stop restart gate bench lock clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# --- set up ----------------------------------------------------------------------------------------------------

setup: .venv/.installed $(MODEL)  ## .venv with the package, its extras and the model

.venv/.installed: requirements.txt pyproject.toml
	@python3 -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	  && /sbin/ldconfig -p | grep -q 'libgomp\.so\.1' \
	  || { as=''; [ "$$(id -u)" = 0 ] || as=sudo; \
	       command -v apt-get >/dev/null && { [ -z "$$as" ] || command -v sudo >/dev/null; } \
	       || { echo 'error: Python 3.11 with venv and libgomp are needed: install $(SYSTEM_PACKAGES)' >&2; exit 2; }; \
	       echo 'installing $(SYSTEM_PACKAGES)'; \
	       $$as apt-get update -q && $$as apt-get install -qy --no-install-recommends $(SYSTEM_PACKAGES); }
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: Python 3.11 or newer is needed, found $$(python3 --version)" >&2; exit 2; }
	python3 -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

$(MODEL): | .venv/.installed
	$(BIN)/loopd model fetch --to $(dir $(MODEL))

lock: .venv/.installed  ## write requirements.txt anew from pyproject.toml (needs the network)
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --all-extras --no-annotate \
	  --no-header --upgrade pyproject.toml -o requirements.txt

# --- use -------------------------------------------------------------------------------------------------------

chat: setup  ## from a fresh machine to a chat: everything set up, model server and daemon started, then bxctl chat
	@$(BIN)/python -m loopd.cli.local start --gguf $(abspath $(MODEL))
	@$(BIN)/bxctl chat $(if $(SESSION),--session $(SESSION),--continue)

restart: setup  ## restart the daemon that `make chat` started (the model server goes on)
	@$(BIN)/python -m loopd.cli.local restart

stop:  ## stop what `make chat` started
	@$(BIN)/python -m loopd.cli.local stop

# --- prove -----------------------------------------------------------------------------------------------------

gate: setup  ## format, lint, types, import rules, tests; last line `gate: ok`
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m pytest
	@echo 'gate: ok'

bench: setup  ## the benchmarks: a table here, and build/bench.json
	$(BIN)/python -m tests.bench

clean:  ## remove .venv and build
	rm -rf .venv build
