"""A quantised copy of one weight: how it is made, what it stands for, and how far it is off."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vlmopt.errors import VlmoptError
from vlmopt.kernels import gemv_q4, gemv_q8, lm_head_q8
from vlmopt.quant.schemes import Scheme

INT8_MAX, FP8_MAX, INT4_MAX = 127, 448, 15
LEAST_SCALE = 2.0**-100
"""Keeps the scale of a row of zeros, or nearly so, a normal number."""
ROWS_AT_ONCE = 16384
"""Rows whose float64 error norms are taken together."""


@dataclass(frozen=True)
class Quantized:
    """The copy of a weight [out, in] as the scheme's kernel takes it.

    `values` [out, in] int8 or float8_e4m3fn and `scale` [out] fp32, or for int4 `values` [out, in / 2] uint8 and
    `scale` and `zero` [in / group, out].
    """

    scheme: Scheme
    values: Tensor
    scale: Tensor
    zero: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The parts by name, as they are saved."""
        parts = {"values": self.values, "scale": self.scale}
        return parts if self.zero is None else {**parts, "zero": self.zero}

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The parts as kernels that know both kinds take them."""
        return self.values, self.scale, self.zero

    @property
    def bytes(self) -> int:
        """Bytes that a decode step reads of it."""
        return sum(part.numel() * part.element_size() for part in self.tensors.values())

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight [out, in] that the copy stands for, rounded to `dtype`."""
        if self.zero is None:
            return gemv_q8.dequantize(self.values, self.scale, dtype)
        return gemv_q4.dequantize(self.values, self.scale, self.zero, dtype)


@dataclass(frozen=True)
class Head8:
    """The output projection with its int8 copy, and the radii within which the copy's logits are right."""

    weight: Tensor
    copy: Quantized
    radius: Tensor

    @property
    def shape(self) -> torch.Size:
        """[vocabulary, hidden]."""
        return self.weight.shape

    def __len__(self) -> int:
        return self.weight.shape[0]


def quantize(weight: Tensor, scheme: Scheme) -> Quantized:
    """The copy of a weight [out, in] by rounding to nearest.

    Raises:
        VlmoptError: see `require_fit`.
    """
    require_fit(weight, scheme)
    return _in_groups(weight, scheme) if scheme.values == "int4" else in_rows(weight, scheme)


def require_fit(weight: Tensor, scheme: Scheme) -> None:
    """Make sure that a weight [out, in] can be quantised.

    Raises:
        VlmoptError: the rows do not divide into the scheme's groups, or hold an infinity or NaN.
    """
    if scheme.group and weight.shape[1] % scheme.group:
        raise VlmoptError(f"rows of {weight.shape[1]} values have no groups of {scheme.group}; take int8 or fp8")
    if not weight.isfinite().all():
        raise VlmoptError("a weight holds an infinity or NaN and cannot be quantised; check the checkpoint")


def in_rows(x: Tensor, scheme: Scheme) -> Quantized:
    """Rows [rows, in] in eight bits with a scale each, of a weight or of what it multiplies; without checks."""
    largest = INT8_MAX if scheme.values == "int8" else FP8_MAX
    scale = (x.abs().amax(1).float() / largest).clamp(min=LEAST_SCALE)
    ratio = x.float() / scale[:, None]
    values = ratio.round().to(torch.int8) if scheme.values == "int8" else ratio.to(torch.float8_e4m3fn)
    return Quantized(scheme, values, scale)


def _in_groups(weight: Tensor, scheme: Scheme) -> Quantized:
    groups = weight.float().unflatten(1, (-1, scheme.group))
    scale, zero = grid(groups, scheme, weight.dtype)
    return of_groups(steps(groups, scale[:, :, None], zero[:, :, None]).flatten(1), scale, zero, scheme, weight.dtype)


def grid(groups: Tensor, scheme: Scheme, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scale, as it is kept in `dtype`, and whole number for zero of groups [..., values] fp32; fp32 [...] both."""
    if not scheme.zero_point:
        scale = _rounded(groups.abs().amax(-1) / (INT4_MAX // 2), dtype)
        return scale, torch.full_like(scale, 8)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = _rounded((high - low) / INT4_MAX, dtype)
    return scale, (-low / scale).round().clamp(0, INT4_MAX)


def steps(values: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """The nearest of the whole numbers 0 … 15, as fp32, that stand for fp32 values on a `grid`."""
    return ((values / scale).round() + zero).clamp(0, INT4_MAX)


def of_groups(values: Tensor, scale: Tensor, zero: Tensor, scheme: Scheme, dtype: torch.dtype) -> Quantized:
    """The copy of whole numbers [out, in] with the scales and zeros [out, in / group] of their `grid`."""
    parts = scale.t().to(dtype).contiguous(), zero.t().to(torch.uint8).contiguous()
    return Quantized(scheme, gemv_q4.pack(values.to(torch.uint8)), *parts)


def _rounded(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale as it is kept, never zero."""
    info = torch.finfo(dtype)
    return scale.to(dtype).float().clamp(min=max(LEAST_SCALE, info.tiny * info.eps))


def head8(weight: Tensor, copy: Quantized) -> Head8:
    """The output projection [vocabulary, hidden] with its int8 copy."""
    parts = zip(*(part.split(ROWS_AT_ONCE) for part in (weight, copy.values, copy.scale)), strict=True)
    return Head8(weight, copy, torch.cat([lm_head_q8.radii(*part) for part in parts]))


def row_errors(weight: Tensor, copy: Quantized) -> Tensor:
    """‖w_i − ŵ_i‖ / ‖w_i‖ of every row, float64 [out]; 0 for a row of zeros that stayed so."""
    found = []
    for start in range(0, len(weight), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        zero = None if copy.zero is None else copy.zero[:, rows]
        part = Quantized(copy.scheme, copy.values[rows], copy.scale[..., rows], zero)
        wide = weight[rows].double()
        off = (wide - part.dequantize(torch.float64)).norm(dim=1)
        found.append(off / wide.norm(dim=1).clamp(min=torch.finfo(torch.float64).tiny))
    return torch.cat(found)
