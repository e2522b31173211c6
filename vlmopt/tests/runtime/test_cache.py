"""The static cache: capacity in powers of two, contents kept on growth."""

import pytest
import torch

from vlmopt.runtime.cache import KVCache, bucket
from vlmopt.weights import collect


@pytest.fixture
def weights(reference):
    return collect(reference.model, packed=False).text


@pytest.mark.parametrize(("length", "expected"), [(1, 512), (512, 512), (513, 1024), (1024, 1024), (5000, 8192)])
def test_bucket(length, expected):
    assert bucket(length) == expected


def test_growth_keeps_contents_and_shrinking_keeps_storage(weights):
    cache = KVCache(weights)
    assert cache.capacity == 0
    assert cache.reserve(10) and cache.buffer.shape == (4, 2, 2, 512, 128)
    cache.buffer.normal_()
    before, pointer = cache.buffer.clone(), cache.buffer.data_ptr()
    assert not cache.reserve(512)
    assert cache.buffer.data_ptr() == pointer
    assert cache.reserve(513) and cache.capacity == 1024
    assert torch.equal(cache.buffer[:, :, :, :512], before)
    assert cache.view(512).data_ptr() == cache.buffer.data_ptr()


def test_stated_memory_is_the_buffers(weights):
    cache = KVCache(weights)
    cache.reserve(700)
    assert KVCache.bytes(weights, 700) == cache.buffer.numel() * cache.buffer.element_size()


def test_eight_bits_are_a_byte_each_and_grow_as_the_others_do(weights):
    cache = KVCache(weights, fp8=True)
    cache.reserve(700)
    assert cache.buffer.dtype == torch.float8_e4m3fn
    assert KVCache.bytes(weights, 700, fp8=True) == cache.buffer.numel() == KVCache.bytes(weights, 700) // 4
    cache.buffer.copy_(torch.randn(cache.buffer.shape))
    before = cache.buffer.float()
    assert cache.reserve(1025)
    assert torch.equal(cache.buffer[:, :, :, :1024].float(), before)
    assert not cache.buffer[:, :, :, 1024:].float().any()
    cache.release()
    assert cache.capacity == 0 and cache.buffer.dtype == torch.float8_e4m3fn
