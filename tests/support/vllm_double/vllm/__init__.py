"""A double of vLLM's server: Relight's own part inside an engine, whole, and nothing of a model around it."""
