"""First product of a vision MLP or merger with its bias and GELU.

    y = gelu(x · Wᵀ + b)

x [rows, in], W [out, in], b [out]; GELU in its tanh form for the blocks and exact (erf) for the mergers. The product is
rounded to the model's dtype before the activation, as transformers does. Class exact.
"""

from torch import Tensor
from torch.nn import functional as F


def bias_gelu_ref(x: Tensor, weight: Tensor, bias: Tensor, approximate: str) -> Tensor:
    """Return [rows, out]; `approximate` is "tanh" or "none" as in torch."""
    return F.gelu(F.linear(x, weight, bias), approximate=approximate)
