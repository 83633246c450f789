# Two commands matter: `make demo` and `make test`. Both do all of their own set-up; run them as root.
SHELL := /bin/bash
PYTEST := .venv/bin/pytest

.DEFAULT_GOAL := help
.PHONY: help demo test test-quick test-kernel test-prometheus test-systemd test-cluster demo-cluster setup-cluster lint format bench golden wheel image setup clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

setup: ## system packages, .venv, test tools
	@tools/setup dev

demo: ## a node, pods, peers, real traffic; what was sent beside what was counted (DATAPATH=nftables ARGS="--keep")
	@tools/setup run
	@.venv/bin/netacct demo $(if $(DATAPATH),--datapath $(DATAPATH)) $(ARGS)

test: setup ## everything: quick tests, tests on the real kernel, with a real Prometheus, on a Debian that boots
	$(PYTEST) -q $(ARGS)

test-quick: setup ## without kernel, Prometheus and containers
	$(PYTEST) -q -m "not kernel and not prometheus and not systemd" $(ARGS)

test-kernel: setup ## only what runs on the real kernel, in namespaces of its own
	$(PYTEST) -q -m kernel $(ARGS)

test-prometheus: setup ## only what runs a real Prometheus or promtool
	$(PYTEST) -q -m prometheus $(ARGS)

test-systemd: setup ## only what boots Debian in containers and runs netacct there as a unit
	$(PYTEST) -q -m systemd $(ARGS)

setup-cluster:
	@tools/setup cluster

test-cluster: setup-cluster ## agents on the nodes of a real Kubernetes cluster, in namespaces of this machine
	$(PYTEST) -q tests/cluster $(ARGS)

demo-cluster: setup-cluster ## such a cluster, an experiment in it, sent beside counted (KEEP=1 leaves it running)
	@tools/cluster demo $(if $(KEEP),--keep) $(ARGS)

lint: setup ## ruff, mypy strict, import contracts, and that every flag, metric and key is documented
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/mypy tests/cluster/conftest.py
	.venv/bin/lint-imports --no-cache
	$(PYTEST) -q tests/unit/test_config_docs.py tests/unit/test_docs_links.py tests/unit/test_docs_metrics.py \
	  tests/unit/test_disruptions_docs.py tests/unit/test_policy_docs.py

format: setup ## let ruff put things in order
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

golden: setup ## write the golden files anew; read the diff before you commit it
	$(PYTEST) -q tests/golden --update-golden

bench: setup ## measure; CHECK=1 fails where a threshold is missed (ARGS="--only read")
	.venv/bin/python tests/bench/run.py $(if $(CHECK),--check) $(ARGS)

wheel: setup ## build the wheel into dist/
	.venv/bin/python -m build --wheel

image: ## build a container image into dist/, without Docker (ARGS="--name registry.example/netacct:1")
	@tools/setup run
	@tools/image $(ARGS)

clean: ## remove everything that make made
	rm -rf .venv .tools build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
