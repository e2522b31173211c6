"""One fused step a file: formula, shapes, rounding points, and the reference in PyTorch that defines it.

These files know tensors only: nothing of transformers, of layers or of stages.
"""
