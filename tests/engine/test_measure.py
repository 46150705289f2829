"""The grid of measurements: its cases, and that its numbers fit together. How fast anything is, is not tested."""

from pathlib import Path

import pytest
import torch

from engine.measure import BareModel, EngineGrid, copy_bandwidth, measure_engine, time_sampler
from engine.profile import unfused_shapes
from tests.engine.tiny_models import TinyModel, make_tiny_family, make_tiny_model

pytestmark = pytest.mark.torch


def write(model: TinyModel, directory: Path) -> Path:
    model.reference.save_pretrained(directory)
    return directory


def make_grid(path: Path) -> EngineGrid:
    return EngineGrid(
        path=path, dtype="float32", numerics="fast", threads=1, block_size=8, streams=(1, 3), contexts=(20, 40),
        chunks=(5, 70), prefill_contexts=(0, 16), bare_dtypes=("float32", "bfloat16"), repeats=2,
    )  # fmt: skip


def test_every_case_of_the_grid_is_measured_beside_bare_products(tmp_path: Path) -> None:
    model = make_tiny_model()
    lines: list[str] = []
    result = measure_engine(make_grid(write(model, tmp_path)), lines.append)
    assert [(c["rows"], c["context"]) for c in result["decode"]] == [(1, 20), (3, 20), (1, 40), (3, 40)]
    assert [(c["tokens"], c["context"]) for c in result["prefill"]] == [(5, 0), (70, 0), (5, 16), (70, 16)]
    assert len(lines) == 8 and lines[0].startswith("decode, 1 rows, context 20: ")
    for case in [*result["decode"], *result["prefill"]]:
        kinds = dict(case["seconds_by_kind"])
        assert sum(kinds.values()) - kinds["total"] == pytest.approx(kinds["total"]), (
            "of two rounds the median is the mean"
        )
        assert 0 < case["sample_seconds"] < case["seconds"]
        for name in ("float32", "bfloat16"):
            assert case["ratio"][name] == case["seconds"] / case["bare_seconds"][name]
    assert result["read_gb_per_s"] > 0 and result["copy_gb_per_s"] > 0


def test_throughput_counts_two_operations_per_weight_and_row(tmp_path: Path) -> None:
    model = make_tiny_model()
    result = measure_engine(make_grid(write(model, tmp_path)), lambda line: None)
    config = model.config
    weights = config.num_layers * sum(n * k for n, k in unfused_shapes(config))
    head = config.vocab_size * config.hidden_size
    found = {(p["rows"], p["head_rows"], p["dtype"]) for p in result["products"]}
    sizes = ((1, 1), (3, 3), (5, 1), (70, 1))
    assert found == {(*size, dtype) for size in sizes for dtype in ("float32", "bfloat16")}
    for entry in result["products"]:
        operations = 2 * (entry["rows"] * weights + entry["head_rows"] * head)
        assert entry["gflop_per_s"] * 1e9 * entry["seconds"] == pytest.approx(operations)


def test_windows_are_measured_when_a_model_has_them(tmp_path: Path) -> None:
    grid = make_grid(write(make_tiny_family("gemma3"), tmp_path))
    result = measure_engine(grid, lambda line: None)
    assert all(case["seconds"] > 0 for case in [*result["decode"], *result["prefill"]])


def test_sampling_is_timed_per_way_and_number_of_rows() -> None:
    entries = time_sampler(500, (1, 4), 1)
    ways = ("greedy", "temperature", "top_p_top_k")
    assert [(e["rows"], e["case"]) for e in entries] == [(rows, way) for rows in (1, 4) for way in ways]
    assert all(entry["seconds"] > 0 for entry in entries)


def test_bare_products_and_copies_take_time(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    assert BareModel(write(make_tiny_model(), tmp_path), "float32", threads).seconds(3, 1) > 0
    assert copy_bandwidth(1 << 20, 1) > 0
