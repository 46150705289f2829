"""How matrix products are computed: kernel and dtype, and for `exact` that a row's bits depend on that row alone.

    numerics  weights   machine                      products
    any       float32   CPU with oneDNN              oneDNN over packed weights
    any       bfloat16  CPU with bfloat16 products   oneDNN over packed bfloat16 weights (fast, one row: streamed)
    fast      bfloat16  CPU without                  streamed up to EMULATED_ROWS_MAX rows, else float32 (two copies)
    exact     bfloat16  CPU without                  float32, from weights rounded to bfloat16
    any       any       other devices                torch's own

A product of few rows costs what reading the weights costs, so half the bytes win there even where bfloat16 arithmetic
is emulated; from a few rows on emulation is many times slower than float32. "Streamed" is a product whose weights are
read once, in the order in which they lie (see `_streamed`). `choose_exact` proves the property on the real shapes when
a worker starts, falls back to padded rows, and raises NumericsError where nothing helps. Knows nothing about layers.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F

from core.errors import NumericsError

NumericsMode = Literal["exact", "fast"]
Kernel = Callable[[torch.Tensor], torch.Tensor]

EMULATED_ROWS_MAX = 2
"""Rows up to which streamed bfloat16 weights beat float32 ones where bfloat16 is emulated; see docs/experiments.md."""
NATIVE_ROWS_MAX = 1
"""The same against packed bfloat16 weights, where bfloat16 is native."""
STREAM_BLOCKS = (96, 64, 128, 32)
"""Columns per block of streamed weights, in order of preference; a weight that none divides is not streamed."""
PROBE_ROWS = (1, 2, 3, 4, 5, 7, 8, 13, 16, 31, 32, 64)
PROBE_ROWS_TOTAL = 96
PROBE_ELEMENTS_MAX = 4 << 20
"""Weights larger than this are probed with few row counts, so that a start stays short."""
PROBE_VALUES = 1 << 14
PROBE_ACTIVATION_ROWS = (2, 3, 5, 13, 31, 64, 127, 250, 511)
UNDIVIDED_ELEMENTS_MAX = 16_384
"""torch never divides less elementwise work among threads. More may go to all of them, as for gelu, or to as many as"""
SHARE_ELEMENTS_MIN = 32_768
"""leave each this much, as for silu."""
VECTOR_ELEMENTS = 64
"""A multiple of what any of torch's CPU loops handles at once."""


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
        def cast(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
            return weight.to(dtype), None if bias is None else bias.to(dtype)

        make = _packed if numerics.is_packed else _plain
        self._wide = _padded(make(*cast(numerics.wide_dtype)), numerics.row_unit)
        self._narrow = _streamed(*cast(numerics.narrow_dtype)) if numerics.narrow_rows_max else self._wide
        self._narrow_dtype = numerics.narrow_dtype
        self._narrow_rows_max = numerics.narrow_rows_max

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """inputs: [T, K]; returns a fresh [T, N] in the inputs' dtype, which the caller may overwrite."""
        if len(inputs) <= self._narrow_rows_max and inputs.dtype == self._narrow_dtype:
            return self._narrow(inputs)
        return self._wide(inputs)


def _plain(weight: torch.Tensor, bias: torch.Tensor | None) -> Kernel:
    return lambda inputs: F.linear(inputs, weight, bias)


def _packed(weight: torch.Tensor, bias: torch.Tensor | None) -> Kernel:
    packed = torch.ops.mkldnn._reorder_linear_weight.default(weight.contiguous(), None)
    linear = torch.ops.mkldnn._linear_pointwise.default
    return lambda inputs: linear(inputs, packed, bias, "none", [], "")


def _streamed(weight: torch.Tensor, bias: torch.Tensor | None) -> Kernel:
    """A product that reads its weights from the first byte to the last.

        weight [N, K]  ->  table [N / block, K, block]
        y[t, n]  =  sum over k of x[t, k] * table[n / block, k, n % block]

    That is a bag of K table rows, weighted by an input row: torch's embedding_bag has a kernel for it that sums in
    float32 and runs at the speed of memory, about twice as fast as its bfloat16 matrix-vector product.
    """
    num_outputs, num_inputs = weight.shape
    block = next((block for block in STREAM_BLOCKS if num_outputs % block == 0), None)
    if block is None:
        return _plain(weight, bias)
    num_blocks = num_outputs // block
    table = weight.view(num_blocks, block, num_inputs).transpose(1, 2).reshape(-1, block)

    def run(inputs: torch.Tensor) -> torch.Tensor:
        num_rows = len(inputs)
        rows, offsets = _bags(num_blocks, num_inputs, num_rows)
        weights = inputs.expand(num_blocks, num_rows, num_inputs).reshape(-1)
        sums = torch.embedding_bag(table, rows, offsets, False, 0, False, weights, True)[0]
        if num_rows > 1:
            sums = sums.view(num_blocks, num_rows, block).transpose(0, 1)
        output = sums.reshape(num_rows, num_outputs)
        return output if bias is None else output.add_(bias)

    return run


@functools.cache
def _bags(num_blocks: int, num_inputs: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Table rows of every (block, input row) in turn, and where each bag starts. int32"""
    rows = torch.arange(num_blocks * num_inputs, dtype=torch.int32).view(num_blocks, 1, num_inputs)
    offsets = torch.arange(0, num_blocks * num_rows * num_inputs + 1, num_inputs, dtype=torch.int32)
    return rows.expand(-1, num_rows, -1).reshape(-1), offsets


def _padded(kernel: Kernel, row_unit: int) -> Kernel:
    if row_unit == 1:
        return kernel

    def run(inputs: torch.Tensor) -> torch.Tensor:
        missing = -len(inputs) % row_unit
        return kernel(F.pad(inputs, (0, 0, 0, missing)))[: len(inputs)] if missing else kernel(inputs)

    return run


def row_exact(function: Kernel) -> Kernel:
    """An elementwise function whose bits do not depend on the batch, for inputs [T, N] that are halves of wider rows.

    Vector instructions compute exponentials with other rounding than the scalar code that handles what is left at the
    end of a run. Where runs end depends on the width of a row, which is the same for all, and on how threads divide the
    elements: unless they do so at the end of a row or of a vector, few enough rows are taken at a time for one thread.
    """

    def run(inputs: torch.Tensor) -> torch.Tensor:
        num_elements, width = inputs.numel(), inputs.shape[1]
        if num_elements <= UNDIVIDED_ELEMENTS_MAX or inputs.device.type != "cpu":
            return function(inputs)
        if width > UNDIVIDED_ELEMENTS_MAX:
            return torch.cat([run(columns) for columns in torch.split(inputs, UNDIVIDED_ELEMENTS_MAX, 1)], dim=1)
        num_threads = torch.get_num_threads()
        shares = {
            -(-num_elements // n) for n in (num_threads, min(num_threads, -(-num_elements // SHARE_ELEMENTS_MIN)))
        }
        if all(_ends_evenly(share, width) for share in shares):
            return function(inputs)
        return torch.cat([function(rows) for rows in torch.split(inputs, UNDIVIDED_ELEMENTS_MAX // width)])

    return run


def is_activation_exact(function: Kernel, width: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether rows of `width` get equal bits in any batch, shown with a value that scalar code rounds otherwise."""
    candidates = torch.linspace(-4, 4, PROBE_VALUES).to(device, dtype)
    apart = candidates.repeat_interleave(2).view(-1, 2)[:, :1]  # not side by side: no vector instructions
    differing = candidates[function(candidates[None])[0] != function(apart)[:, 0]]
    if not len(differing):
        return True
    rows_max = max(2, PROBE_ELEMENTS_MAX // 4 // width)
    inputs = differing[0].expand(rows_max, 2 * width).contiguous()[:, :width]
    alone = function(inputs[:1])
    counts = {rows for rows in PROBE_ACTIVATION_ROWS if rows < rows_max} | {rows_max}
    return all(bool((function(inputs[:rows]) == alone).all()) for rows in counts)


def _ends_evenly(share: int, width: int) -> bool:
    """Whether every thread's share ends at the end of a row, or at that of a vector in rows of whole vectors."""
    return share % width == 0 or (share % VECTOR_ELEMENTS == 0 and width % VECTOR_ELEMENTS == 0)


def has_native_bfloat16(device: torch.device) -> bool:
    """Whether products of bfloat16 are faster than those of float32."""
    return device.type != "cpu" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def choose_fast(dtype: torch.dtype, device: torch.device) -> Numerics:
    """The fastest policy by the table above. dtype: of the weights."""
    is_cpu = device.type == "cpu"
    is_emulated = dtype == torch.bfloat16 and not has_native_bfloat16(device)
    native_rows_max = NATIVE_ROWS_MAX if is_cpu and dtype == torch.bfloat16 else 0
    return Numerics(
        mode="fast",
        wide_dtype=torch.float32 if is_emulated else dtype,
        narrow_dtype=dtype,
        narrow_rows_max=EMULATED_ROWS_MAX if is_emulated else native_rows_max,
        is_packed=is_cpu and torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]
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
