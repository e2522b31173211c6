"""Final norm, output projection and greedy choice.

    logits = rms_norm(h) · Wᵀ;   token = argmax(logits)

h [1, hidden], W [vocabulary, hidden]. Stock converts the logits to fp32 and takes torch.argmax, which is what is done
here, so ties resolve as stock's do. Class exact. Moves vocabulary·hidden weights.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from vlmopt.kernels.add_rms_norm import add_rms_norm_ref


def lm_head_logits_ref(h: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
    """Return the logits [1, vocabulary] in the model's dtype."""
    return F.linear(add_rms_norm_ref(h, None, norm, eps)[0], weight)


def lm_head_argmax_ref(h: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
    """Return the most likely token id [1] (int64)."""
    return lm_head_logits_ref(h, norm, eps, weight).to(torch.float32).argmax(dim=-1)
