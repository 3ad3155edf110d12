"""The process that owns engines: tiny, stable, standard library only; agents come and go above it."""
