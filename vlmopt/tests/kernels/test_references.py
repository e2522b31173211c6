"""Every reference against the stock module that it stands for, in both dtypes, on odd sizes, bit by bit."""

import pytest
import torch
from transformers.models.qwen3_vl import modeling_qwen3_vl as stock

from vlmopt.kernels.add_rms_norm import add_rms_norm_ref
from vlmopt.kernels.decode_attention import decode_attention_masked_ref, decode_attention_ref
from vlmopt.kernels.deepstack_add import deepstack_add_ref
from vlmopt.kernels.lm_head import lm_head_argmax_ref, lm_head_logits_ref
from vlmopt.kernels.merge_embeddings import merge_embeddings_ref
from vlmopt.kernels.prefill_attention import prefill_attention_ref
from vlmopt.kernels.qkv_norm_rope_cache import qkv_norm_rope_cache_ref
from vlmopt.kernels.swiglu import swiglu_ref
from vlmopt.kernels.vision_attention import vision_attention_ref
from vlmopt.kernels.vision_rotary import vision_rotary_ref
from vlmopt.stages.connector import slots_of

pytestmark = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@pytest.fixture
def randn(dtype):
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator).to(dtype)


@pytest.mark.parametrize("shape", [(1, 256), (7, 129), (3, 5, 128)])
def test_add_rms_norm(randn, dtype, shape):
    norm = stock.Qwen3VLTextRMSNorm(shape[-1], eps=1e-6).to(dtype)
    norm.weight.data = randn(shape[-1])
    x, residual = randn(*shape), randn(*shape)
    y, h = add_rms_norm_ref(x, residual, norm.weight.data, 1e-6)
    assert torch.equal(h, residual + x) and torch.equal(y, norm(residual + x).data)
    alone, same = add_rms_norm_ref(x, None, norm.weight.data, 1e-6)
    assert same is x and torch.equal(alone, norm(x).data)
    assert not torch.equal(alone, add_rms_norm_ref(x, None, norm.weight.data, 1e-1)[0])


@pytest.mark.parametrize("packed", [True, False])
def test_qkv_norm_rope_cache(randn, dtype, packed):
    rows, heads, kv_heads, width = 5, 4, 2, 128
    q, k, v = randn(rows, heads * width), randn(rows, kv_heads * width), randn(rows, kv_heads * width)
    cos, sin, q_norm, k_norm = randn(rows, width), randn(rows, width), randn(width), randn(width)
    caches = torch.full((2, kv_heads, 16, width), float("nan"), dtype=dtype)
    positions = torch.arange(3, 3 + rows)
    products = [torch.cat([q, k, v], dim=-1)] if packed else [q, k, v]
    rotated = qkv_norm_rope_cache_ref(products, q_norm, k_norm, 1e-6, cos, sin, caches[0], caches[1], positions)

    def heads_first(x, norm_weight):
        norm = stock.Qwen3VLTextRMSNorm(width, eps=1e-6).to(dtype)
        norm.weight.data = norm_weight
        return norm(x.view(1, rows, -1, width)).transpose(1, 2).data

    expected_q, expected_k = stock.apply_rotary_pos_emb(
        heads_first(q, q_norm), heads_first(k, k_norm), cos[None], sin[None]
    )
    assert torch.equal(rotated.transpose(0, 1), expected_q[0])
    assert torch.equal(caches[0][:, 3:8], expected_k[0])
    assert torch.equal(caches[1][:, 3:8], v.view(rows, kv_heads, width).transpose(0, 1))
    untouched = torch.cat([caches[:, :, :3], caches[:, :, 8:]], dim=2)
    assert untouched.isnan().all(), "rows of other positions were written"


def test_prefill_attention_is_causal_and_grouped(randn, dtype):
    q, k, v = randn(6, 4, 128), randn(2, 9, 128), randn(2, 9, 128)
    out = prefill_attention_ref(q, k, v)
    k64, v64 = (x[:, :6].double().repeat_interleave(2, dim=0) for x in (k, v))
    scores = q.double().transpose(0, 1) @ k64.transpose(1, 2) / 128**0.5
    scores = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), float("-inf"))
    expected = (scores.softmax(-1) @ v64).transpose(0, 1).flatten(1)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    k[:, 6:] = float("nan")
    assert torch.equal(prefill_attention_ref(q, k, v), out), "rows beyond the prompt were read"


@pytest.mark.parametrize("length", [1, 2, 17, 64])
def test_both_decode_references_agree(randn, dtype, length):
    q, k, v = randn(1, 4, 128), randn(2, 64, 128), randn(2, 64, 128)
    live = decode_attention_ref(q, k, v, length)
    bias = torch.zeros(64, dtype=dtype).masked_fill(torch.arange(64) >= length, float("-inf"))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(decode_attention_masked_ref(q, k, v, bias), live, rtol=tolerance, atol=tolerance)
    if length < 64:
        wrong = decode_attention_masked_ref(q, k, v, torch.zeros(64, dtype=dtype))
        assert (wrong - live).abs().max() > 0.05


def test_swiglu(randn, dtype):
    for width in (77, 768):
        gate, up = randn(3, width), randn(3, width)
        expected = torch.nn.functional.silu(gate) * up
        assert torch.equal(swiglu_ref([gate, up]), expected)
        packed = swiglu_ref([torch.cat([gate, up], dim=-1)])
        # narrow strided rows take another loop on a CPU, whose last bit may differ
        torch.testing.assert_close(packed, expected, rtol=0 if width == 768 else 1e-6, atol=0)
        assert not torch.equal(swiglu_ref([up, gate]), expected)


def test_lm_head_and_its_ties(randn, dtype):
    h, norm, weight = randn(1, 64), randn(64), randn(300, 64)
    logits = lm_head_logits_ref(h, norm, 1e-6, weight)
    token = lm_head_argmax_ref(h, norm, 1e-6, weight)
    assert token.shape == (1,) and logits[0, token] == logits.max()
    best = int(token)
    weight[best - 1 if best else 1] = weight[best]
    lowest = min(best, best - 1 if best else 1)
    assert int(lm_head_argmax_ref(h, norm, 1e-6, weight)) == lowest


def test_deepstack_add_touches_only_its_rows(randn, dtype):
    h, features, rows = randn(9, 32), randn(4, 32), torch.tensor([1, 2, 5, 8])
    before, slots = h.clone(), slots_of([0, 1, 1, 0, 0, 2, 0, 0, 1])
    assert slots.dtype == torch.int32 and slots.tolist() == [-1, 0, 1, -1, -1, 2, -1, -1, 3]
    out = deepstack_add_ref(h, slots, features)
    assert torch.equal(h, before)
    assert torch.equal(out[rows], before[rows] + features)
    others = torch.tensor([0, 3, 4, 6, 7])
    assert torch.equal(out[others], before[others])


def test_merge_embeddings(randn, dtype):
    ids, embed, slots, features = torch.tensor([4, 9, 9, 0]), randn(10, 16), slots_of([0, 1, 1, 0]), randn(2, 16)
    out = merge_embeddings_ref(ids, embed, slots, features)
    assert torch.equal(out, torch.stack([embed[4], features[0], features[1], embed[0]]))
    assert torch.equal(merge_embeddings_ref(ids, embed, None, None), embed[ids])


def test_vision_rotary(randn, dtype):
    qkv, cos, sin = randn(6, 3 * 3 * 64), randn(6, 64).float(), randn(6, 64).float()
    q, k, v = vision_rotary_ref(qkv, cos, sin, 3)
    raw_q, raw_k, raw_v = qkv.view(6, 3, 3, 64).unbind(1)
    expected = stock.apply_rotary_pos_emb_vision(raw_q, raw_k, cos, sin)
    assert torch.equal(q, expected[0]) and torch.equal(k, expected[1]) and torch.equal(v, raw_v)


def test_vision_attention_stays_within_its_image(randn, dtype):
    q, k, v = (randn(10, 3, 64) for _ in range(3))
    out = vision_attention_ref(q, k, v, (4, 6))
    assert torch.equal(out[:4], vision_attention_ref(q[:4], k[:4], v[:4], (4,)))
    v[4:] = float("nan")
    assert torch.equal(vision_attention_ref(q, k, v, (4, 6))[:4], out[:4])
    assert not torch.equal(vision_attention_ref(q, k, v.nan_to_num(), (10,))[:4], out[:4])
