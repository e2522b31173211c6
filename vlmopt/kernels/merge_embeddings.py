"""Token embeddings and visual features in one sequence.

    x = E[ids];   x[rows] = features

ids [T] int64, E [vocabulary, hidden], rows [N] int64 (the image tokens, ascending), features [N, hidden]. Class exact
(copies only). Moves T·hidden values twice.
"""

from torch import Tensor
from torch.nn import functional as F


def merge_embeddings_ref(ids: Tensor, embed: Tensor, rows: Tensor | None, features: Tensor | None) -> Tensor:
    """Return [T, hidden]; `rows` None means a prompt without images."""
    x = F.embedding(ids, embed)
    return x if rows is None else x.index_copy(0, rows, features.to(x.dtype))
