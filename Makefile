# Every command of the README. `make setup` runs by itself when it is needed.
PYTHON ?= python3
DEPLOYMENT ?= p5-2node
OUT ?= runs/demo
# job, or a Job to run once before it: preflight, directories, prepare-data.
CHART ?= job
# REPOSITORY@sha256:DIGEST; left out, what `make image` built last, if it did.
IMAGE_FILE ?= dist/$(DEPLOYMENT).image.txt
IMAGE ?= $(if $(wildcard $(IMAGE_FILE)),$(shell cat $(IMAGE_FILE)))

BIN := .venv/bin
READY := .venv/.ready
FILE := deployments/$(DEPLOYMENT).yaml
export JSII_SILENCE_WARNING_END_OF_LIFE_NODE_VERSION := 20

.PHONY: help setup demo test check verify cost synth manifests deploy image clean

help:  ## show this
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 18

setup: $(READY)  ## install everything into .venv and node_modules (runs by itself when needed)

$(READY): bootstrap.py requirements.txt requirements-dev.txt training/requirements.txt package.json package-lock.json
	@$(PYTHON) bootstrap.py

synth: $(READY)  ## CloudFormation templates into cdk.out/, offline; DEPLOYMENT=all: of every deployment
ifeq ($(DEPLOYMENT),all)
	@$(BIN)/python app.py --all cdk.out
else
	@PATH="$(CURDIR)/$(BIN):$$PATH" npx --no-install cdk synth --quiet --context deployment=$(DEPLOYMENT)
	@echo "cdk.out: $$(ls cdk.out/*.template.json | wc -l) templates"
endif

manifests: $(READY)  ## Kubernetes manifests into dist/<deployment>/; CHART=preflight and others: see README
	@$(BIN)/python -m k8s.main --deployment $(FILE) --chart $(CHART) \
		--out dist/$(DEPLOYMENT)$(if $(filter-out job,$(CHART)),-$(CHART)) $(if $(IMAGE),--image $(IMAGE))

demo: $(READY)  ## synth, manifests, and a drill: training survives an exception and a SIGKILL
	@echo "== AWS: synthesize $(DEPLOYMENT)" && $(MAKE) --no-print-directory synth
	@echo "== Kubernetes: manifests of $(DEPLOYMENT)" && $(MAKE) --no-print-directory manifests
	@echo "== Drill: train on this machine, raise an exception on rank 1, kill rank 0"
	@$(BIN)/python -m drills run --deployment deployments/local.yaml --out $(OUT) \
		--fault exception@25:rank1 --fault sigkill@42:rank0

test: $(READY)  ## every test, on CPU, with real processes
	@$(BIN)/python -m pytest

check: $(READY)  ## lint, types, layers, then the tests
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .
	@$(BIN)/basedpyright
	@$(BIN)/lint-imports
	@$(MAKE) --no-print-directory test

verify: $(READY)  ## what AWS or Kubernetes would refuse in the deployment file, in a second
	@$(BIN)/python -m config.check $(FILE)

cost: $(READY)  ## list price of the deployment, per hour and month
	@$(BIN)/python -m config.cost $(FILE)

deploy: $(READY)  ## cdk deploy of every stack (needs AWS credentials; costs money)
	@PATH="$(CURDIR)/$(BIN):$$PATH" npx --no-install cdk deploy --all --context deployment=$(DEPLOYMENT)

image: $(READY)  ## build the trainer image on AWS, no Docker needed here (needs credentials; costs about a dollar)
	@PATH="$(CURDIR)/$(BIN):$$PATH" npx --no-install cdk deploy Image --context deployment=$(DEPLOYMENT)
	@$(BIN)/python image_build.py --deployment $(FILE) --out $(IMAGE_FILE)

clean:  ## remove what was generated; .venv and node_modules stay
	@rm -rf cdk.out dist runs
