"""Whether `vllm bench serve` and `pdcluster bench serve` say the same of one server; see docs/bench.md.

    python -m tests.e2e.measure_agreement URL VLLM MODEL_DIR [ROUNDS [CONCURRENCY]]

VLLM is the executable of a vLLM installation in an environment of its own, MODEL_DIR the served model's directory (vLLM
needs the tokenizer). Both measure the same kind of load in turn, in alternating order, every run with prompts of its
own. The server's speed differs from run to run by more than the two tools do; so each mean is also divided by what the
server's own `/metrics` count for the same requests, and those quotients are compared. Nobody else may use the server.
Prints per round ours over vLLM's, then the medians; 1.00 is agreement. Fails when a run has failures.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.scraped import Scrape

INPUT_LEN, OUTPUT_LEN, NUM_PROMPTS = 256, 64, 16
TIMEOUT_S = 1800
SERVED = {
    "ttft": "vllm:time_to_first_token_seconds",
    "tpot": "vllm:request_time_per_output_token_seconds",
    "itl": "vllm:inter_token_latency_seconds",
    "e2el": "vllm:e2e_request_latency_seconds",
}
"""The server's histogram of what a tool measures from outside."""
KEYS = (
    "request_throughput", "output_throughput", "total_token_throughput", "total_input_tokens", "total_output_tokens",
    *(f"{stat}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el") for stat in ("mean", "median", "p90")),
    *(f"{name} over the server's" for name in ("ttft", "tpot", "itl", "e2el")),
)  # fmt: skip


def run_vllm(
    vllm: str, url: str, model: str, directory: str, concurrency: int, seed: int, path: Path
) -> dict[str, Any]:
    # Without the ready check: it sends the first prompt, which would then be in the prefix cache.
    arguments = f"""bench serve --backend openai --base-url {url} --endpoint /v1/completions --model {model}
        --tokenizer {directory} --dataset-name random --random-input-len {INPUT_LEN} --random-output-len {OUTPUT_LEN}
        --num-prompts {NUM_PROMPTS} --max-concurrency {concurrency} --ignore-eos --temperature 0 --seed {seed}
        --ready-check-timeout-sec 0 --percentile-metrics ttft,tpot,itl,e2el --metric-percentiles 50,90,99
        --save-result --result-dir {path.parent} --result-filename {path.name} --disable-tqdm"""
    return _run([vllm, *arguments.split()], path)


def run_ours(url: str, model: str, concurrency: int, seed: int, path: Path) -> dict[str, Any]:
    arguments = f"""-m cluster.cli bench serve --base-url {url} --model {model} --input-len {INPUT_LEN}
        --output-len {OUTPUT_LEN} --num-prompts {NUM_PROMPTS} --max-concurrency {concurrency} --seed {seed}
        --result {path} --extra-body {{"temperature":0}}"""
    return _run([sys.executable, *arguments.split()], path)


def _run(command: list[str], path: Path) -> dict[str, Any]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise SystemExit(f"{command[0]} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(path.read_text())
    assert result["completed"] == NUM_PROMPTS, f"{command[0]}: {result['completed']} of {NUM_PROMPTS} completed"
    return result


class Server:
    """What the server counted since the last question."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._seen = self._read()

    def _read(self) -> dict[str, tuple[float, float]]:
        values = Scrape(httpx.get(f"{self._url}/metrics").text)
        return {
            key: (sum(values.select(f"{name}_sum").values()), sum(values.select(f"{name}_count").values()))
            for key, name in SERVED.items()
        }

    def take_means_ms(self) -> dict[str, float]:
        before, self._seen = self._seen, self._read()
        count = self._seen["e2el"][1] - before["e2el"][1]
        assert count == NUM_PROMPTS, f"the server served {count} requests, not {NUM_PROMPTS}: is somebody else there?"
        return {
            key: 1000 * (total - before[key][0]) / (count - before[key][1])
            for key, (total, count) in self._seen.items()
        }


def main(url: str, vllm: str, directory: str, rounds: int = 5, concurrency: int = 4) -> None:
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    ratios: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        run_ours(url, model, concurrency, 999, Path(folder) / "warm-up.json")
        server = Server(url)
        for index in range(rounds):
            results: dict[str, dict[str, Any]] = {}
            for name in ("vllm", "ours") if index % 2 == 0 else ("ours", "vllm"):
                path = Path(folder) / f"{name}-{index}.json"
                if name == "vllm":
                    results[name] = run_vllm(vllm, url, model, directory, concurrency, 1000 + index, path)
                else:
                    results[name] = run_ours(url, model, concurrency, 2000 + index, path)
                means = server.take_means_ms()
                found = {key: results[name][f"mean_{key}_ms"] / mean for key, mean in means.items()}
                results[name].update({f"{key} over the server's": value for key, value in found.items()})
            ratios.append({key: results["ours"][key] / results["vllm"][key] for key in KEYS})
            print(f"round {index + 1}: " + ", ".join(f"{k} {v:.3f}" for k, v in ratios[-1].items()), flush=True)
    for key in KEYS:
        values = [found[key] for found in ratios]
        print(f"{key:<26} ours over vllm: median {statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f})")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], *map(int, sys.argv[4:]))
