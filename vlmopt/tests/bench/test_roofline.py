import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vlmopt.bench import roofline

ROOT = Path(__file__).resolve().parents[3]


def two_b_config(**text_changes):
    text = {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "dtype": None,
    }
    vision = {
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "in_channels": 3,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 2048,
        "deepstack_visual_indexes": [5, 11, 17],
    }
    return SimpleNamespace(
        dtype=torch.bfloat16,
        text_config=SimpleNamespace(**text | text_changes),
        vision_config=SimpleNamespace(**vision),
    )


GRID = (1, 48, 64)  # a 768×1024 image in patches of 16


def test_matrices_of_a_decode_step():
    assert roofline.matvec_shapes(two_b_config()) == {
        "qkv": (4096, 2048),
        "o": (2048, 2048),
        "gate_up": (12288, 2048),
        "down": (2048, 6144),
        "head": (151936, 2048),
    }


def test_decode_bytes_of_the_2b_model():
    weights = 28 * (4096 * 2048 + 2048 * 2048 + 12288 * 2048 + 2048 * 6144) + 151936 * 2048
    assert roofline.decode_bytes(two_b_config()) == 2 * weights
    assert roofline.decode_bytes(two_b_config()) == pytest.approx(3.44e9, rel=1e-3)
    assert roofline.decode_bytes(two_b_config(), weight_bytes=1) == weights


def test_each_cached_position_costs_its_keys_and_values():
    config = two_b_config()
    per_position = roofline.decode_bytes(config, 1, weight_bytes=1) - roofline.decode_bytes(config, 0, weight_bytes=1)
    assert per_position == 28 * 2 * 8 * 128 * 2
    in_eight_bits = roofline.decode_bytes(config, 1, cache_bytes=1) - roofline.decode_bytes(config, 0, cache_bytes=1)
    assert in_eight_bits == per_position / 2


def test_decode_floor_matches_the_measured_copy_rate():
    assert roofline.decode_floor_ms(two_b_config(), gb_per_s=4270) == pytest.approx(0.806, abs=1e-3)
    assert roofline.decode_floor_ms(two_b_config(), gb_per_s=4270, weight_bytes=1) == pytest.approx(0.403, abs=1e-3)


def test_decode_flops_are_two_per_weight_plus_attention():
    config = two_b_config()
    assert roofline.decode_flops(config) == roofline.decode_bytes(config)
    assert roofline.decode_flops(config, 10) - roofline.decode_flops(config) == 28 * 4 * 10 * 2048


def test_prefill_and_vision_flops_of_the_reference_prompt():
    config = two_b_config()
    assert roofline.prefill_flops(config, 798, GRID) == pytest.approx(5.3e12, rel=0.01)
    assert roofline.vision_flops(config, GRID) == pytest.approx(2.947e12, rel=1e-3)
    assert roofline.prefill_floor_ms(config, 798, GRID, tflop_per_s=790) == pytest.approx(6.7, abs=0.05)


def test_text_alone_has_no_vision_flops():
    config = two_b_config()
    with_image = roofline.prefill_flops(config, 798, GRID)
    assert with_image - roofline.prefill_flops(config, 798) == roofline.vision_flops(config, GRID)


def test_frames_attend_within_themselves():
    config = two_b_config()
    assert roofline.vision_flops(config, (2, 48, 64)) == 2 * roofline.vision_flops(config, GRID)


def test_patch_size_given_per_dimension():
    config = two_b_config()
    config.vision_config.patch_size = [16, 16]
    config.vision_config.temporal_patch_size = (2,)
    assert roofline.vision_flops(config, GRID) == roofline.vision_flops(two_b_config(), GRID)


@pytest.mark.parametrize(
    "own, of_text, expected",
    [(torch.float32, None, 4), (None, torch.float16, 2), ("float32", None, 4), (None, None, 2)],
)
def test_element_size_follows_the_checkpoint(own, of_text, expected):
    config = two_b_config(dtype=of_text)
    config.dtype = own
    assert roofline.element_bytes(config) == expected


@pytest.fixture
def one_millisecond(monkeypatch):
    """Every measurement takes 1 ms; the launches still run once."""

    def launch_time(launches, **kwargs):
        for launch in launches:
            launch()
        return [1.0, 1.0, 1.0]

    monkeypatch.setattr(roofline, "launch_time", launch_time)


def test_rates_follow_from_bytes_flops_and_time(one_millisecond):
    assert roofline.copy_rate("cpu", 4_000_000).value == pytest.approx(8.0)  # read and written, GB/s
    assert roofline.read_rate("cpu", 4_000_000).value == pytest.approx(4.0)
    assert roofline.gemm_rate("cpu", 100).value == pytest.approx(2e6 / 1e9)  # TFLOP/s
    rate = roofline.matvec_rates({"o": (1000, 500)}, "cpu")["o"]
    assert (rate.value, rate.unit) == (pytest.approx(1.0), "GB/s")


def test_matvec_cycles_through_cold_copies(monkeypatch):
    seen = []
    monkeypatch.setattr(roofline, "launch_time", lambda launches, **kwargs: seen.append(len(launches)) or [1.0])
    roofline.matvec_rates({"o": (1000, 500)}, "cpu")
    assert seen[0] * 1000 * 500 * 2 > roofline.COLD_BYTES_CPU


def test_ceilings_of_this_machine_are_plausible():
    copy = roofline.copy_rate("cpu", 2**24)
    assert len(copy.samples) == 25
    assert 0.1 < copy.value < 2000
    assert 1e-4 < roofline.gemm_rate("cpu", 256).value < 100
    assert "GB/s" in str(copy)


INTERPRETED = """
import torch
from vlmopt.bench.read_kernel import CHUNK, partial_sums
x = torch.arange(3 * CHUNK, dtype=torch.float32) % 7
partial = torch.full((3,), float("nan"))
partial_sums(x, partial)
assert torch.equal(partial, x.view(3, CHUNK).sum(1)), partial
for bad in (x[:-1], x.double(), x[::2]):
    try:
        partial_sums(bad, partial)
    except ValueError:
        continue
    raise SystemExit(f"accepted {bad.shape} {bad.dtype}")
print("every element read")
"""


def test_read_kernel_reads_every_element_and_refuses_odd_buffers():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == "every element read", done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the Triton read kernel is timed on a CUDA device")
def test_read_rate_of_a_gpu_is_at_least_its_copy_rate_by_half():
    assert roofline.read_rate("cuda", 2**30).value > roofline.copy_rate("cuda", 2**30).value / 2
