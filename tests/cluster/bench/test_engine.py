"""`bench engine` as a whole on a tiny model, and served streams beside bare products."""

import json
from pathlib import Path

import pytest

from cluster.bench import engine
from cluster.bench.record import RequestRecord
from cluster.bench.results import read_result, write_result
from core.clock import SystemClock
from core.errors import BenchError
from engine.measure import EngineGrid
from tests.cluster.bench.fake_server import Body, FakeAnswer, FakeServer, plain_answer, serving
from tests.engine.tiny_models import make_tiny_model

pytestmark = [pytest.mark.torch, pytest.mark.process]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_tiny_model().reference.save_pretrained(path)
    return path


def with_ids(body: Body) -> FakeAnswer:
    """A plain answer whose chunks carry token ids."""
    whole = plain_answer(body, 0.01, 0.005)
    pieces = [(wait_s, data.replace(b'"text"', b'"token_ids": [7], "text"')) for wait_s, data in whole.pieces]
    return FakeAnswer(pieces=pieces)


def served(url: str, directory: Path) -> engine.ServedOptions:
    return engine.ServedOptions(
        base_url=url, path=directory, dtype="float32", threads=1, streams=(1, 3), context=16, rounds=2
    )


def test_result_has_the_documented_keys_and_survives_a_file(directory: Path, tmp_path: Path) -> None:
    grid = EngineGrid(
        path=directory, dtype="float32", numerics="fast", threads=1, streams=(1, 2), contexts=(16,), chunks=(8,),
        repeats=2,
    )  # fmt: skip
    lines: list[str] = []
    result = engine.bench_engine(grid, SystemClock(), lines.append)
    keys = {"kind", "date", "processor", "torch", "decode", "prefill", "products", "sampler", "read_gb_per_s",
            "copy_gb_per_s", "digest_gb_per_s", "config"}  # fmt: skip
    assert result.keys() == keys
    case = {"seconds", "sample_seconds", "seconds_by_kind", "bare_seconds", "ratio", "repeats"}
    assert result["decode"][0].keys() == case | {"rows", "context"}
    assert result["prefill"][0].keys() == case | {"tokens", "context"}
    documented = (Path(__file__).parents[3] / "docs" / "bench.md").read_text()
    assert not {key for key in keys | case if f"`{key}`" not in documented}
    write_result(tmp_path / "e.json", result)
    assert read_result(tmp_path / "e.json") == json.loads(json.dumps(result))
    assert lines[-1].startswith("memory: read ")


def test_served_streams_alternate_with_bare_products(directory: Path) -> None:
    server = FakeServer(with_ids)
    with serving(server):
        result = engine.run_bench_served(served(server.url, directory), SystemClock(), lambda line: None)
    assert [(r["round"], r["rows"]) for r in result["rounds"]] == [(0, 1), (0, 3), (1, 1), (1, 3)]
    for entry in result["rounds"]:
        assert entry["ratio"] == entry["seconds_per_token"] / entry["bare_seconds"]
        assert entry["seconds_per_token"] > 0.004 and entry["ttft_seconds"] > 0.009
    assert set(result["median_ratio"]) == {"1", "3"}
    assert len({tuple(body["prompt"]) for body in server.bodies}) == len(server.bodies) == 9
    assert {body["temperature"] for body in server.bodies} == {0}


def test_nothing_is_compared_when_a_served_request_fails(directory: Path) -> None:
    server = FakeServer(lambda body: FakeAnswer(pieces=with_ids(body).pieces[:3]))
    with serving(server), pytest.raises(BenchError, match="truncated"):
        engine.run_bench_served(served(server.url, directory), SystemClock(), lambda line: None)


def test_gaps_count_only_while_all_streams_decode() -> None:
    first, second = (
        RequestRecord(started_s=0.0, num_prompt_tokens=1, num_output_tokens=len(times), token_times_s=times)
        for times in ([1.0, 2.0, 3.0, 4.0], [2.0, 2.5, 3.0, 9.0])
    )
    assert engine.seconds_per_token([first]) == 1.0
    last = RequestRecord(started_s=0.0, num_prompt_tokens=1, num_output_tokens=2, token_times_s=[5.0, 6.0])
    with pytest.raises(BenchError, match=r"2 streams: never decoded together.*decode\.max_running"):
        engine.seconds_per_token([first, last])
    assert engine.seconds_per_token([first, second]) == pytest.approx((1 + 1 + 0.5 + 0.5) / 4)
