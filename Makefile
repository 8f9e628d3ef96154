# Everything a fresh machine needs: Python 3.11 and make. Nothing is installed outside .venv.

PYTHON ?= python3.11
VENV ?= .venv
EXTRA ?= cpu
BIN := $(VENV)/bin
READY := $(VENV)/.ready-$(EXTRA)
WORK ?= results

.PHONY: demo test unit server lint conformance bench clean

demo: $(READY)  ## the policies on one mixed trace, on the real server, in a quarter of an hour
	$(BIN)/horizonserve demo --work $(WORK)

test: lint unit server  ## every test: policy, real scheduler classes, real server over HTTP

unit: $(READY)  ## the tests that start no server
	$(BIN)/python -m pytest -m "not server"

server: $(READY)  ## the tests on real servers
	$(BIN)/python -m pytest -m server

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

conformance: $(READY)  ## vLLM's own scheduler tests against our classes
	$(BIN)/python scripts/conformance --work $(WORK)/conformance

bench: $(READY)  ## the README's results table; 80 minutes, resumable
	$(BIN)/python benchmarks/slots.py --model $(WORK)/models/qwen2.5-omni-small \
		--deploy configs/deploy/qwen2_5_omni_small.yaml --out $(WORK)/slots

$(READY): pyproject.toml overrides.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade uv
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python \
		--override overrides.txt -e ".[$(EXTRA),test]"
	touch $@

clean:
	rm -rf $(VENV) $(WORK)
