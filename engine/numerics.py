"""How matrix products are computed: kernel and dtype, and for `exact` that a row's bits depend on that row alone.

    numerics  weights   machine                      products
    any       float32   CPU with oneDNN              oneDNN over packed weights
    any       bfloat16  CPU with bfloat16 products   oneDNN over packed bfloat16 weights
    fast      bfloat16  CPU without                  bfloat16 up to NARROW_ROWS_MAX rows, else float32 (two copies)
    exact     bfloat16  CPU without                  float32, from weights rounded to bfloat16
    any       any       other devices                torch's own

A product of few rows costs what reading the weights costs, so half the bytes win there even where bfloat16 arithmetic
is emulated; from a few rows on emulation is many times slower than float32. `choose_exact` proves the property on the
real shapes when a worker starts, falls back to padded rows, and raises NumericsError where nothing helps. Knows nothing
about layers.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F

from core.errors import NumericsError

NumericsMode = Literal["exact", "fast"]
Kernel = Callable[[torch.Tensor], torch.Tensor]

NARROW_ROWS_MAX = 2
"""Rows up to which emulated bfloat16 beats float32; measured, see docs/experiments.md."""
PROBE_ROWS = (1, 2, 3, 4, 5, 7, 8, 13, 16, 31, 32, 64)
PROBE_ROWS_TOTAL = 96
PROBE_ELEMENTS_MAX = 4 << 20
"""Weights larger than this are probed with few row counts, so that a start stays short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """A policy for the products of one model on one device."""

    mode: NumericsMode
    wide_dtype: torch.dtype
    """Activations of a step of more than `narrow_rows_max` tokens."""
    narrow_dtype: torch.dtype
    """Activations of the other steps."""
    narrow_rows_max: int
    is_packed: bool
    """oneDNN over packed weights for `wide_dtype`."""
    row_unit: int = 1
    """Rows of a product are padded to a multiple of this."""

    def step_dtype(self, num_tokens: int) -> torch.dtype:
        """Dtype of the activations of a step."""
        return self.narrow_dtype if num_tokens <= self.narrow_rows_max else self.wide_dtype


class Product:
    """y = x W^T + b for one weight, in every dtype that a step of this policy may have."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, numerics: Numerics) -> None:
        make = _packed if numerics.is_packed else _plain
        wide = make(weight.to(numerics.wide_dtype), None if bias is None else bias.to(numerics.wide_dtype))
        self._kernels: dict[torch.dtype, Kernel] = {numerics.wide_dtype: _padded(wide, numerics.row_unit)}
        if numerics.narrow_rows_max and numerics.narrow_dtype != numerics.wide_dtype:
            narrow = (weight.to(numerics.narrow_dtype), None if bias is None else bias.to(numerics.narrow_dtype))
            self._kernels[numerics.narrow_dtype] = _plain(*narrow)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """inputs: [T, K]; returns a fresh [T, N] in the inputs' dtype, which the caller may overwrite."""
        return self._kernels[inputs.dtype](inputs)


def _plain(weight: torch.Tensor, bias: torch.Tensor | None) -> Kernel:
    return lambda inputs: F.linear(inputs, weight, bias)


def _packed(weight: torch.Tensor, bias: torch.Tensor | None) -> Kernel:
    packed = torch.ops.mkldnn._reorder_linear_weight.default(weight.contiguous(), None)
    linear = torch.ops.mkldnn._linear_pointwise.default
    return lambda inputs: linear(inputs, packed, bias, "none", [], "")


def _padded(kernel: Kernel, row_unit: int) -> Kernel:
    if row_unit == 1:
        return kernel

    def run(inputs: torch.Tensor) -> torch.Tensor:
        missing = -len(inputs) % row_unit
        return kernel(F.pad(inputs, (0, 0, 0, missing)))[: len(inputs)] if missing else kernel(inputs)

    return run


def has_native_bfloat16(device: torch.device) -> bool:
    """Whether products of bfloat16 are faster than those of float32."""
    return device.type != "cpu" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def choose_fast(dtype: torch.dtype, device: torch.device) -> Numerics:
    """The fastest policy by the table above. dtype: of the weights."""
    is_packed = device.type == "cpu" and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    is_emulated = dtype == torch.bfloat16 and not has_native_bfloat16(device)
    return Numerics(
        mode="fast",
        wide_dtype=torch.float32 if is_emulated else dtype,
        narrow_dtype=dtype,
        narrow_rows_max=NARROW_ROWS_MAX if is_emulated else 0,
        is_packed=is_packed,
    )


def choose_exact(dtype: torch.dtype, device: torch.device, shapes: Iterable[tuple[int, int]]) -> Numerics:
    """The first policy whose products, on every (N, K) of `shapes`, give a row the same bits in any batch.

    Raises NumericsError when none does.
    """
    fast = choose_fast(dtype, device)
    base = replace(fast, mode="exact", narrow_dtype=fast.wide_dtype, narrow_rows_max=0)
    packings = (True, False) if base.is_packed else (False,)
    candidates = [replace(base, is_packed=packed, row_unit=unit) for packed in packings for unit in (1, 4, 8, 16)]
    distinct = sorted(set(shapes))
    for candidate in candidates:
        if all(is_row_exact(shape, candidate, device) for shape in distinct):
            return candidate
    raise NumericsError(problem=f"no product of {dtype} on {device} gives a row the same bits in every batch")


def is_row_exact(shape: tuple[int, int], numerics: Numerics, device: torch.device) -> bool:
    """Whether a product of this shape gives equal bits for the first rows alone and among PROBE_ROWS_TOTAL."""
    generator = torch.Generator().manual_seed(shape[0] * 31 + shape[1])
    weight = torch.randn(shape, generator=generator).to(device, numerics.wide_dtype)
    inputs = torch.randn(PROBE_ROWS_TOTAL, shape[1], generator=generator).to(device, numerics.wide_dtype)
    product = Product(weight, None, numerics)
    whole = product(inputs)
    probes = PROBE_ROWS if weight.numel() <= PROBE_ELEMENTS_MAX else (1, 2, 5, 16)
    return all(torch.equal(product(inputs[:rows].contiguous()), whole[:rows]) for rows in probes)
