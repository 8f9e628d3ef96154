"""Run vLLM's own scheduler tests against our schedulers; see tests/conformance/README.md."""
