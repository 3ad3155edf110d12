"""As vLLM has it."""
