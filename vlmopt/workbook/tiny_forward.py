"""The tiny model's forward pass for training: plain functions over its parameters, one image size a batch.

The stock modules make training slow in three ways: vision attention runs image by image, position tables are built
anew for every call, and image features are scattered into the prompt by a mask. Here every image of a batch has the
same size, so that attention is one batched call, the tables are made once per size, and the image is a slice of the
sequence. The logits are the stock model's (a test compares them).

Each sequence is `PREFIX`, the image's tokens, then the tail: question, answer, padding.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3VLForConditionalGeneration
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from vlmopt.stages.decode import Taps
from vlmopt.workbook.tiny import TOKEN_ID

PREFIX = (TOKEN_ID["<|im_start|>"], *b"user\n", TOKEN_ID["<|vision_start|>"])
ANSWER_FOLLOWS = (TOKEN_ID["<|im_end|>"], *b"\n", TOKEN_ID["<|im_start|>"], *b"assistant\n")
TAIL = 112  # tokens after the image: the longest question and answer together
IGNORED = -100  # the label of a token that is not to be learnt


def tail_tokens(question: str, answer: str) -> tuple[list[int], list[int]]:
    """The tokens after the image, and for each the token to learn next: only the answer and its end are learnt.

    Both lists have TAIL entries.
    """
    asked = [TOKEN_ID["<|vision_end|>"], *question.encode(), *ANSWER_FOLLOWS]
    answered = [*answer.encode(), TOKEN_ID["<|im_end|>"]]
    padding = TAIL - len(asked) - len(answered)
    if padding < 0:
        raise ValueError(f"question and answer are {-padding} tokens longer than the {TAIL} of a training tail")
    tokens = asked + answered + [TOKEN_ID["<|endoftext|>"]] * padding
    labels = [IGNORED] * (len(asked) - 1) + answered + [IGNORED] * (padding + 1)
    return tokens, labels


def patches(image: Tensor) -> Tensor:
    """Images 0..255, [B, 3, H, W], as normalised patches [B, H/16 * W/16, 768] in the processor's order.

    The processor repeats a still image over the two frames of a temporal patch; here one frame is kept.
    """
    batch, _, height, width = image.shape
    blocks = (image / 127.5 - 1).view(batch, 3, height // 32, 2, 16, width // 32, 2, 16)
    return blocks.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(batch, -1, 768)


@dataclass(frozen=True)
class Tables:
    """Everything that depends on the image size alone.

    `prefix` [1, 7] holds the tokens before the image; `grid` [N, 400] resamples the learned position grid to N patches;
    the cosines and signed sines of the rotary embeddings are [N, 1, 64] for vision, [sequence, 1, 128] for text.
    """

    prefix: Tensor
    grid: Tensor
    vision_rotary: tuple[Tensor, Tensor]
    text_rotary: tuple[Tensor, Tensor]
    visual_tokens: int


def signed(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Tables for `rotate`: the sine of the first half of a head negated, a head axis added."""
    half = sin.shape[-1] // 2
    return cos.unsqueeze(-2), torch.cat([-sin[..., :half], sin[..., half:]], -1).unsqueeze(-2)


def make_tables(model: Qwen3VLForConditionalGeneration, size: tuple[int, int], tail: int = TAIL) -> Tables:
    """The tables of one image size, by the stock model's own functions and modules, in fp32 on the CPU."""
    visual, language = model.model.visual, model.model.language_model
    rows, columns = size[0] // 16, size[1] // 16
    grid_thw = torch.tensor([[1, rows, columns]])
    indices, weights = get_vision_interpolation_indices_and_weights(
        grid_thw,
        num_grid_per_side=visual.num_grid_per_side,
        mode=visual.interpolation_mode,
        align_corners=visual.interpolation_align_corners,
        spatial_merge_size=visual.spatial_merge_size,
    )
    grid = torch.zeros(rows * columns, visual.pos_embed.num_embeddings).scatter_add_(1, indices, weights)
    one = torch.zeros(1)
    vision = visual.rotary_pos_emb(one, get_vision_position_ids(grid_thw, visual.spatial_merge_size))

    visual_tokens = rows * columns // 4
    kinds = torch.tensor([[0] * len(PREFIX) + [1] * visual_tokens + [0] * tail], dtype=torch.int32)
    positions, _ = model.model.get_rope_index(torch.zeros_like(kinds).long(), kinds, image_grid_thw=grid_thw)
    text = [table[0] for table in language.rotary_emb(one, positions)]
    return Tables(torch.tensor([PREFIX]), grid, signed(*vision), signed(*text), visual_tokens)


def move(tables: Tables, device: torch.device, dtype: torch.dtype) -> Tables:
    """The tables on a device in a dtype."""
    vision, text = (
        tuple(table.to(device, dtype) for table in pair) for pair in (tables.vision_rotary, tables.text_rotary)
    )
    prefix, grid = tables.prefix.to(device), tables.grid.to(device, dtype)
    return Tables(prefix, grid, vision, text, tables.visual_tokens)


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of [B, N, heads, D]: the halves of a head are swapped by a roll, the sign is in the sine."""
    cos, sin = tables
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Attention over [B, N, heads, D], the heads joined in the result: [B, N, heads * D]."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped).transpose(1, 2).flatten(2)


class Forward:
    """The batched forward pass of a configuration."""

    def __init__(self, config):
        vision, text = config.vision_config, config.text_config
        self.vision_heads = vision.num_heads
        self.blocks = vision.depth
        self.deepstack = list(vision.deepstack_visual_indexes)
        self.layers = text.num_hidden_layers
        self.head_dim = text.head_dim
        self.eps = text.rms_norm_eps
        self.vocabulary = text.vocab_size

    def __call__(
        self, w: Mapping[str, Tensor], tables: Tables, images: Tensor, tail: Tensor, taps: Taps = None
    ) -> Tensor:
        """Logits [B, T, vocabulary] of the tail.

        Args:
            w: the model's parameters by name, in the dtype to compute in.
            tables: of the images' size, in that dtype.
            images: fp32 [B, 3, H, W], 0..255.
            tail: int64 [B, T], the tokens after the image.
            taps: gets the rows [B, sequence, width] after each of its layers.
        """
        features, deep = self.see(w, tables, images)
        embedding = w["model.language_model.embed_tokens.weight"]
        before = self.embed(w, tables.prefix).expand(len(tail), -1, -1)
        x = torch.cat([before, features, self.embed(w, tail)], 1)
        x = self.read(w, tables, x, deep, taps)[:, -tail.shape[1] :]
        return F.linear(self.norm(w, "model.language_model.norm", x), embedding)

    def embed(self, w, tokens: Tensor) -> Tensor:
        """Embedding as a product with one-hot rows, whose gradient is a product too: fast and free of atomics."""
        embedding = w["model.language_model.embed_tokens.weight"]
        hot = tokens.unsqueeze(-1) == torch.arange(self.vocabulary, device=tokens.device)
        return hot.to(embedding.dtype) @ embedding

    def norm(self, w, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), w[f"{name}.weight"], self.eps)

    def layer_norm(self, w, name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), w[f"{name}.weight"], w[f"{name}.bias"], 1e-6)

    def linear(self, w, name: str, x: Tensor) -> Tensor:
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def see(self, w, tables: Tables, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The vision tower: merged features [B, visual tokens, width of the text] and the DeepStack features."""
        kernel = w["model.visual.patch_embed.proj.weight"].sum(2).flatten(1)  # both frames show the same image
        x = F.linear(patches(images).to(kernel.dtype), kernel, w["model.visual.patch_embed.proj.bias"])
        x = x + tables.grid @ w["model.visual.pos_embed.weight"]
        deep = []
        for i in range(self.blocks):
            x = self.vision_block(w, f"model.visual.blocks.{i}", x, tables.vision_rotary)
            if i in self.deepstack:
                name = f"model.visual.deepstack_merger_list.{len(deep)}"
                joined = x.unflatten(1, (-1, 4)).flatten(2)
                deep.append(self.merge(w, name, self.layer_norm(w, f"{name}.norm", joined)))
        x = self.layer_norm(w, "model.visual.merger.norm", x).unflatten(1, (-1, 4)).flatten(2)
        return self.merge(w, "model.visual.merger", x), deep

    def vision_block(self, w, name: str, x: Tensor, rotary) -> Tensor:
        h = self.linear(w, f"{name}.attn.qkv", self.layer_norm(w, f"{name}.norm1", x))
        q, k, v = h.unflatten(-1, (3, self.vision_heads, -1)).unbind(2)
        h = attend(rotate(q, rotary), rotate(k, rotary), v, causal=False)
        x = x + self.linear(w, f"{name}.attn.proj", h)
        h = self.linear(w, f"{name}.mlp.linear_fc1", self.layer_norm(w, f"{name}.norm2", x))
        return x + self.linear(w, f"{name}.mlp.linear_fc2", F.gelu(h, approximate="tanh"))

    def merge(self, w, name: str, x: Tensor) -> Tensor:
        return self.linear(w, f"{name}.linear_fc2", F.gelu(self.linear(w, f"{name}.linear_fc1", x)))

    def read(self, w, tables: Tables, x: Tensor, deep: list[Tensor], taps: Taps = None) -> Tensor:
        """The language model's layers over [B, sequence, width], DeepStack features added after the first ones."""
        first, visual = len(PREFIX), tables.visual_tokens
        for i in range(self.layers):
            x = self.text_layer(w, f"model.language_model.layers.{i}", x, tables.text_rotary)
            if i < len(deep):
                before, image, tail = x.split([first, visual, x.shape[1] - first - visual], 1)
                x = torch.cat([before, image + deep[i], tail], 1)
            if taps and i in taps:
                taps[i] = x
        return x

    def text_layer(self, w, name: str, x: Tensor, rotary) -> Tensor:
        h = self.norm(w, f"{name}.input_layernorm", x)
        q, k, v = (
            self.linear(w, f"{name}.self_attn.{part}_proj", h).unflatten(-1, (-1, self.head_dim)) for part in "qkv"
        )
        q, k = self.norm(w, f"{name}.self_attn.q_norm", q), self.norm(w, f"{name}.self_attn.k_norm", k)
        h = attend(rotate(q, rotary), rotate(k, rotary), v, causal=True)
        x = x + self.linear(w, f"{name}.self_attn.o_proj", h)
        h = self.norm(w, f"{name}.post_attention_layernorm", x)
        h = F.silu(self.linear(w, f"{name}.mlp.gate_proj", h)) * self.linear(w, f"{name}.mlp.up_proj", h)
        return x + self.linear(w, f"{name}.mlp.down_proj", h)
