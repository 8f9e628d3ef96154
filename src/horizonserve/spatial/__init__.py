"""SM caps: how many SMs the shared stage may use while downstream stages run beside it."""
