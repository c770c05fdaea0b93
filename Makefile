# --- the appliance: a virtual device, rollout, checks on a device ------------------------------------------------
# DEVICE is a host that ssh knows, or the name of a virtual device (`virtual`). Nothing here needs the core targets
# but `setup`, which makes .venv and fetches the model file.

.PHONY: setup-device device-up device-down deploy rollback uninstall verify-device lint-ansible

NAME ?= virtual
DEVICE_DEBS := mmdebstrap systemd-container iproute2 openssh-client util-linux
DEVICE_PYTHON := .venv/bin/python
SSH_CONFIG := $(wildcard build/devices/$(DEVICE)/ssh_config)
ANSIBLE := cd ansible && $(if $(SSH_CONFIG),ANSIBLE_SSH_ARGS="-F $(abspath $(SSH_CONFIG))") \
	../.venv/bin/ansible-playbook -i $(or $(INVENTORY),$(DEVICE)$(comma)) $(if $(INVENTORY),--limit $(DEVICE))
comma := ,

build/.device-python: pyproject.toml
	@test -x $(DEVICE_PYTHON) || python3 -m venv .venv
	$(DEVICE_PYTHON) -m pip install --quiet --disable-pip-version-check --editable '.[device]'
	@mkdir -p build && touch $@

# Debian packages are installed here, and only those that are missing.
setup-device: build/.device-python
	@missing=$$(for deb in $(DEVICE_DEBS); do dpkg-query -W -f '$${Status}' $$deb 2>/dev/null | grep -q 'ok installed' || echo $$deb; done); \
	if [ -n "$$missing" ]; then \
	  [ "$$(id -u)" = 0 ] || { echo "error: Debian packages are missing: $$(echo $$missing)"; echo "hint: sudo make setup-device"; exit 1; } >&2; \
	  echo "setup-device: installing $$(echo $$missing)"; \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $$missing >/dev/null; \
	fi

device-up: setup-device
	@PYTHONPATH=device-checks $(DEVICE_PYTHON) -m virtual up $(NAME)

device-down:
	@PYTHONPATH=device-checks python3 -m virtual down $(NAME)

deploy: setup-device
	@test -n "$(DEVICE)" || { echo "error: no device given"; echo "hint: make deploy DEVICE=<host that ssh knows, or virtual>"; exit 1; } >&2
	@$(ANSIBLE) $(ANSIBLE_FLAGS) site.yml

