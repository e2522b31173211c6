"""Gated activation of the text MLP.

    y = silu(gate) · up

Products come packed as one [rows, 2·n] (gate first) or separately as two [rows, n]; result [rows, n]. silu is rounded
to the model's dtype before the product, as transformers does. Class exact; on a CPU the strided halves of a narrow
packed row may take another loop than separate rows do, and differ in silu's last bit. Moves 3·n values a row.
"""

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F


def swiglu_ref(products: Sequence[Tensor]) -> Tensor:
    """Return [rows, n]."""
    gate, up = products[0].chunk(2, dim=-1) if len(products) == 1 else products
    return F.silu(gate) * up
