"""The contest's measuring protocol: harness, score, TextVQA accuracy, timing and measured ceilings.

Nothing is imported here, so that `benchmark.py --help` answers at once.
"""
