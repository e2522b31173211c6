"""Training of an EAGLE-3 head for the embedded model, which stays as it is: fresh signs, and what it says of them.

From every position of an answer the head goes on for several steps as it does when it drafts: it reads the model's
features first, then its own states (training-time test; Li et al., 2025). At step s, position t reads the token at
t + 1 + s and is to name the one that the model chooses after it. Its attention sees what the first step wrote up to t
and what t itself has written since, which is what a cache holds when drafts are made.
"""

import copy
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm.auto import tqdm

from vlmopt.files import write_atomic
from vlmopt.runtime import eagle_head
from vlmopt.runtime.eagle_head import Head, shape_for
from vlmopt.stages.connector import positions
from vlmopt.stages.tables import rope
from vlmopt.weights import collect
from vlmopt.workbook import signs, tiny_train
from vlmopt.workbook.tiny import TOKEN_ID
from vlmopt.workbook.tiny_forward import IGNORED, PREFIX, Forward, make_tables, move
from vlmopt.workbook.tiny_step import Batch, photograph

TAPS = (0, 1, 2)
"""The embedded model's layers below its last."""
AHEAD = 4
"""Steps that the head goes on from every position."""
FADING = 0.8
"""What a step's loss counts of the one before it."""
WARM_UP = 0.05
CLIP = 1.0
TOKEN = 0.3
"""Of random weights, with which the token that follows is read at first."""
ROWS = 8
"""Of what is told about the training."""


@dataclass(frozen=True)
class Effort:
    """How long to train: `steps` of `batch` questions, about `strips` strings, up to a learning rate of `peak`."""

    steps: int
    batch: int
    strips: int
    peak: float = 1e-3


@dataclass(frozen=True)
class Lesson:
    """Sequences of one length T: `tokens` [B, T] int64, the model's rows after each tapped layer [B, T, hidden], what
    it chooses after each position of an answer (`greedy` [B, T], else `IGNORED`), and the angles [T, D]."""

    tokens: Tensor
    taps: list[Tensor]
    greedy: Tensor
    rope: tuple[Tensor, Tensor]


class Teacher:
    """The embedded model in fp32, asked for what a head is to learn."""

    def __init__(self, model: nn.Module, taps: Sequence[int]):
        self.text, self.taps, self.device = collect(model, packed=False).text, taps, model.device
        self._on_cpu, self._forward, self._tables = copy.deepcopy(model).cpu(), Forward(model.config), {}
        self._weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

    @torch.no_grad()
    def lesson(self, batch: Batch, pixels: Tensor) -> Lesson:
        """A batch of questions with their right answers, cut behind the longest."""
        size, (rows, columns) = batch.size, (batch.size[0] // 16, batch.size[1] // 16)
        used = int((batch.labels != IGNORED).any(0).nonzero().max()) + 1
        tail, labels = batch.tail[:, :used].to(self.device), batch.labels[:, :used].to(self.device)
        if (size, used) not in self._tables:
            self._tables[size, used] = move(make_tables(self._on_cpu, size, used), self.device, torch.float32)
        tables, taps = self._tables[size, used], dict.fromkeys(self.taps)
        images = photograph(batch.signs.to(self.device), pixels, size)
        logits = self._forward(self._weights, tables, images, tail, taps)
        before = torch.tensor([*PREFIX, *[TOKEN_ID["<|image_pad|>"]] * tables.visual_tokens], device=self.device)
        tokens = torch.cat([before.expand(len(tail), -1), tail], 1)
        greedy = torch.full_like(tokens, IGNORED)
        greedy[:, len(before) :] = logits.argmax(-1).masked_fill(labels == IGNORED, IGNORED)
        types = np.array([0] * len(PREFIX) + [1] * tables.visual_tokens + [0] * used)
        places, _ = positions(types, [(1, rows, columns)], 2)
        return Lesson(tokens, list(taps.values()), greedy, rope(places.to(self.device), self.text, torch.float32))


def answers_ahead(head: Head, embed: Tensor, lesson: Lesson, ahead: int = AHEAD) -> Iterator[tuple[Tensor, Tensor]]:
    """For every step the head's logits [B, S, drafted] at the positions that may draft, and what the model says there
    [B, S], `IGNORED` where it is not asked."""
    learnt = (lesson.greedy != IGNORED).any(0).nonzero()
    first, end = int(learnt.min()) - 1, lesson.tokens.shape[1] - 1
    starts = torch.arange(first, end, device=embed.device)
    features = head.fuse(lesson.taps)[:, :-1]
    angles = tuple(table[:-1] for table in lesson.rope)
    x = head.mix(embed[lesson.tokens[:, 1:]], features)
    keys = [head.keys(x, angles)]
    seen = [torch.arange(end, device=embed.device) <= starts[:, None]]
    x, states = x[:, first:], features[:, first:]
    for step in range(ahead):
        rows = (starts + step).clamp(max=end)
        angles = tuple(table[rows] for table in lesson.rope)
        if step:
            x = head.mix(embed[lesson.tokens[:, (rows + 1).clamp(max=end)]], states)
            keys.append(head.keys(x, angles))
            seen.append(torch.eye(len(starts), dtype=torch.bool, device=embed.device))
        k, v = (torch.cat(parts, 2) for parts in zip(*keys, strict=True))
        states = head(x, states, angles, k, v, torch.cat(seen, 1))
        asked = lesson.greedy[:, (rows + 1).clamp(max=end)]
        yield head.logits(states), asked.masked_fill(starts + step + 1 > end, IGNORED)


def train(model: nn.Module, effort: Effort, seed: int) -> tuple[Head, list[dict[str, Any]]]:
    """A head for the embedded model in fp32, on its device, and what was seen on the way: some rows with `step`, `loss`
    and, by how many steps ahead, the share of tokens that are the model's own."""
    rng = random.Random(seed)
    strips = signs.draw_strips(seed, effort.strips, is_held_out=False)
    teacher, pixels = Teacher(model, TAPS), strips.pixels.to(model.device)
    embed = teacher.text.embed.detach()
    torch.manual_seed(seed)
    head = _begun(teacher)
    optimizer = torch.optim.AdamW(head.parameters(), effort.peak, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step / effort.steps))
    told, every = [], max(1, effort.steps // ROWS)
    for step in tqdm(range(effort.steps), desc="training the head", leave=False):
        kinds = rng.choices(list(tiny_train.MIX), list(tiny_train.MIX.values()), k=effort.batch)
        batch = tiny_train.make_batch(rng, strips, rng.choice(signs.SIZES), kinds, tiny_train.SINGLES_LEFT)
        found = list(answers_ahead(head, embed, teacher.lesson(batch, pixels)))
        loss = sum(FADING**ahead * _loss(*each) for ahead, each in enumerate(found))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        if step % every == 0 or step == effort.steps - 1:
            right = {f"ahead {ahead + 1}": _right(*each) for ahead, each in enumerate(found)}
            told.append({"step": step + 1, "loss": loss.item(), **right})
    return head.eval(), told


def save(head: Head, folder: str | Path) -> Path:
    """Write a head as the published ones are written: its tensors, and the settings that these do not tell.

    Raises:
        VlmoptError: the folder cannot be written.
    """
    folder, shape = Path(folder), head.shape
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    config = {"rms_norm_eps": shape.eps, "eagle_config": {eagle_head.LAYERS: [*shape.taps]}}
    write_atomic(folder / eagle_head.CONFIG, json.dumps(config, indent=1) + "\n")
    write_atomic(folder / eagle_head.WEIGHTS, safetensors.torch.save(tensors))
    return folder


@torch.no_grad()
def _begun(teacher: Teacher) -> Head:
    """A head that begins as the model's last layer and head over the row before them, and hardly looks at the token."""
    text, last = teacher.text, teacher.text.layers[-1]
    head = Head(shape_for(text, teacher.taps)).to(teacher.device)
    hidden, layer = head.shape.hidden, head.midlayer
    head.fc.weight.zero_()[:, -hidden:].fill_diagonal_(1)
    for name, linear in zip("qkv", last.qkv, strict=True):
        weight = layer["self_attn"][f"{name}_proj"].weight
        weight[:, hidden:] = linear.weight
        weight[:, :hidden] *= TOKEN
    same = [
        *((layer["hidden_norm"], last.input_norm), (layer["post_attention_layernorm"], last.post_norm)),
        *((layer["self_attn"]["o_proj"], last.o), (layer["mlp"]["down_proj"], last.down)),
        *zip((layer["mlp"]["gate_proj"], layer["mlp"]["up_proj"]), last.gate_up, strict=True),
        *((head.norm, text.norm), (head.lm_head, text.head)),
    ]
    for own, theirs in same:
        own.weight.copy_(theirs.weight)
    return head


def _rate(share: float) -> float:
    """Of the highest learning rate: up, then down in a line."""
    return min(1.0, share / WARM_UP + 0.01, (1 - share) / (1 - WARM_UP) + 0.01)


def _loss(logits: Tensor, asked: Tensor) -> Tensor:
    """The mean over what is asked, which may be nothing where all answers are short."""
    each = F.cross_entropy(logits.flatten(0, 1), asked.flatten(), ignore_index=IGNORED, reduction="sum")
    return each / (asked != IGNORED).sum().clamp(min=1)


def _right(logits: Tensor, asked: Tensor) -> float | None:
    learnt = asked != IGNORED
    return (logits.argmax(-1) == asked)[learnt].float().mean().item() if learnt.any() else None
