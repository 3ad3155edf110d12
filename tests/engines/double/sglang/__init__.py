"""Stands in for SGLang in tests: its control API behaves as 0.5.23 does, traps included. Nothing of it is shipped."""
