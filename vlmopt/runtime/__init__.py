"""The static cache, the captured decode step, and the generate loop with its contract."""
