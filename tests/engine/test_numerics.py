"""Policies of matrix products: which dtype, which padding, and what happens where no product is row-exact."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

import engine.numerics as numerics_module
from core.errors import NumericsError
from engine.numerics import (
    EMULATED_ROWS_MAX,
    UNDIVIDED_ELEMENTS_MAX,
    Kernel,
    Product,
    choose_exact,
    choose_fast,
    is_activation_exact,
    row_exact,
)

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")


def _drifting(period: int) -> object:
    """A kernel maker whose results depend on the number of rows modulo `period` (0: on the number itself)."""

    def make(weight: torch.Tensor, bias: torch.Tensor | None) -> Kernel:
        def run(inputs: torch.Tensor) -> torch.Tensor:
            rows = len(inputs) % period if period else len(inputs)
            return inputs @ weight.T + 0.001 * rows

        return run

    return make


def _replace_kernels(monkeypatch: pytest.MonkeyPatch, period: int) -> None:
    monkeypatch.setattr(numerics_module, "_packed", _drifting(period))
    monkeypatch.setattr(numerics_module, "_plain", _drifting(period))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_outputs", [40, 32, 64, 192])
def test_product_equals_linear_when_rows_are_few_or_many(dtype: torch.dtype, num_outputs: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(num_outputs, 24, generator=generator).to(dtype)
    bias = torch.randn(num_outputs, generator=generator).to(dtype)
    numerics = choose_fast(dtype, CPU)
    product = Product(weight, bias, numerics)
    for rows in (1, 2, 3, 17):
        inputs = torch.randn(rows, 24, generator=generator).to(numerics.step_dtype(rows))
        wanted = inputs.double() @ weight.double().T + bias.double()
        tolerance = 1e-4 if inputs.dtype == torch.float32 else 0.15
        torch.testing.assert_close(product(inputs).double(), wanted, atol=tolerance, rtol=0)


def test_exact_products_give_a_row_equal_bits_in_any_batch() -> None:
    generator = torch.Generator().manual_seed(1)
    weight, inputs = torch.randn(100, 52, generator=generator), torch.randn(70, 52, generator=generator)
    product = Product(weight, None, choose_exact(torch.float32, CPU, [(100, 52)]))
    whole = product(inputs)
    for rows in range(1, 70):
        assert torch.equal(product(inputs[:rows].contiguous()), whole[:rows])


def test_bfloat16_runs_few_rows_narrow_and_many_wide_when_it_is_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics_module, "has_native_bfloat16", lambda device: False)
    fast = choose_fast(torch.bfloat16, CPU)
    assert fast.step_dtype(EMULATED_ROWS_MAX) == torch.bfloat16
    assert fast.step_dtype(EMULATED_ROWS_MAX + 1) == torch.float32
    exact = choose_exact(torch.bfloat16, CPU, [(16, 8)])
    assert exact.step_dtype(1) == torch.float32


def test_bfloat16_runs_in_one_dtype_when_it_is_native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics_module, "has_native_bfloat16", lambda device: True)
    fast = choose_fast(torch.bfloat16, CPU)
    assert {fast.step_dtype(rows) for rows in (1, 2, 3, 512)} == {torch.bfloat16}


def test_exact_pads_rows_when_the_kernel_needs_a_multiple(monkeypatch: pytest.MonkeyPatch) -> None:
    _replace_kernels(monkeypatch, 8)
    assert choose_exact(torch.float32, CPU, [(16, 8)]).row_unit == 8


def test_exact_is_refused_when_no_padding_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    _replace_kernels(monkeypatch, 0)
    with pytest.raises(NumericsError, match="numerics: fast"):
        choose_exact(torch.float32, CPU, [(16, 8)])


@pytest.fixture(params=[1, 2, 3, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def gelu(inputs: torch.Tensor) -> torch.Tensor:
    return F.gelu(inputs, approximate="tanh")


@pytest.mark.parametrize("function", [F.silu, gelu])
@pytest.mark.parametrize("width", [80, 100, 1536, UNDIVIDED_ELEMENTS_MAX + 40])
def test_row_exact_activation_gives_a_row_equal_bits_in_any_batch(function: Kernel, width: int, threads: int) -> None:
    """Widths that threads divide within a vector and not; left halves of wider rows, as the MLP has them."""
    rows = 7 if width > UNDIVIDED_ELEMENTS_MAX else 501
    inputs = (torch.randn(rows, 2 * width, generator=torch.Generator().manual_seed(3)) * 3)[:, :width]
    exact = row_exact(function)
    whole = exact(inputs)
    torch.testing.assert_close(whole, function(inputs))
    for count in (1, 2, 5, rows // 2):
        assert torch.equal(exact(inputs[:count]), whole[:count])
        assert torch.equal(exact(inputs[-count:]), whole[-count:])
    assert is_activation_exact(exact, width, torch.float32, CPU)


@pytest.mark.parametrize("function", [F.silu, gelu])
def test_bare_activation_is_seen_to_depend_on_the_batch_when_threads_divide_rows(function: Kernel) -> None:
    """If this fails, torch does itself what `row_exact` is for."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    is_exact = is_activation_exact(function, 100, torch.float32, CPU)
    torch.set_num_threads(before)
    assert not is_exact
