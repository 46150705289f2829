"""GGUF files become whole Hugging Face directories, once; the bundled model computes what the golden file says."""

import fcntl
import json
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from core.errors import ModelLoadError
from engine.model import gguf_import
from engine.model.checkpoint import SINGLE_FILE
from engine.model.config import RopeScaling
from engine.model.directory import check_directory, read_config
from engine.model.gguf_import import import_gguf

Tensors = dict[str, NDArray[Any]]
WriteGguf = Callable[..., Path]
GOLDEN = json.loads((Path(__file__).parents[2] / "data/smollm2-135m-golden.json").read_text(encoding="utf-8"))
TEXTS = (
    "1234 5,678.90 and 3.14e-10",
    "héllo wörld, 你好世界。 مرحبا ½ ² ٣٤",
    "🙂👩‍👩‍👧 🇫🇷 done",
    "def f(x):\n\treturn x**2  # 42\n\n\nprint(f'{f(7):>10}')\r\n",
    "<|im_start|>user\n  spaces   and\ttabs  <|im_end|>\n",
    "it's we'LL they'd 'quoted'",
)


def permute(rows: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """Row order of llama.cpp's converter: within each head, row i of the first half goes before row i of the second."""
    heads = np.split(rows, num_heads)
    pairs = [row for head in heads for pair in zip(*np.split(head, 2), strict=True) for row in pair]
    return np.stack(pairs)


def test_directory_is_whole_when_imported(write_gguf: WriteGguf, tmp_path: Path) -> None:
    path = import_gguf(write_gguf(), tmp_path / "cache" / "tiny")
    config = check_directory(path)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (1, 4, 2, 8)
    assert (config.rms_norm_eps, config.rope_theta, config.dtype) == (1e-5, 10_000.0, "float32")
    assert (config.bos_token_id, config.eos_token_ids, config.tie_word_embeddings) == (0, (1,), False)
    assert Tokenizer.from_file(str(path / "tokenizer.json")).encode("ab12").tokens == ["ab", "1", "2"]


def test_rows_are_in_hugging_faces_order_when_imported(
    write_gguf: WriteGguf, gguf_tensors: Tensors, tmp_path: Path
) -> None:
    query, key = gguf_tensors["blk.0.attn_q.weight"], gguf_tensors["blk.0.attn_k.weight"]
    permuted = {"blk.0.attn_q.weight": permute(query, 4), "blk.0.attn_k.weight": permute(key, 2)}
    weights = load_file(import_gguf(write_gguf(tensors=permuted), tmp_path / "tiny") / SINGLE_FILE)
    np.testing.assert_array_equal(weights["model.layers.0.self_attn.q_proj.weight"], query)
    np.testing.assert_array_equal(weights["model.layers.0.self_attn.k_proj.weight"], key)
    value = gguf_tensors["blk.0.attn_v.weight"]
    np.testing.assert_array_equal(weights["model.layers.0.self_attn.v_proj.weight"], value)


def test_each_dtype_is_kept_or_dequantised(write_gguf: WriteGguf, gguf_tensors: Tensors, tmp_path: Path) -> None:
    down, value = gguf_tensors["blk.0.ffn_down.weight"], gguf_tensors["blk.0.attn_v.weight"].astype(np.float16)
    source = write_gguf(tensors={"blk.0.attn_v.weight": value}, quantized=frozenset({"blk.0.ffn_down.weight"}))
    weights = load_file(import_gguf(source, tmp_path / "tiny") / SINGLE_FILE)
    stored = weights["model.layers.0.self_attn.v_proj.weight"]
    assert stored.dtype == np.float16
    np.testing.assert_array_equal(stored, value)
    kind = GGMLQuantizationType.Q8_0
    np.testing.assert_array_equal(
        weights["model.layers.0.mlp.down_proj.weight"], dequantize(quantize(down, kind), kind)
    )


def test_embeddings_are_tied_when_there_is_no_output_tensor(write_gguf: WriteGguf, tmp_path: Path) -> None:
    assert read_config(import_gguf(write_gguf(tensors={"output.weight": None}), tmp_path / "tiny")).tie_word_embeddings


def test_llama3_scaling_is_recovered_from_its_factors(write_gguf: WriteGguf, tmp_path: Path) -> None:
    # Wavelengths at theta 500,000 and head_dim 8: 6, 167, 4443 (between 8192 / 4 and 8192 / 1) and 118,144.
    smooth = (8192 / (2 * np.pi * 500_000.0**0.5) - 1) / 3
    factors = np.array([1.0, 1.0, 1 / ((1 - smooth) / 8 + smooth), 8.0], np.float32)
    path = import_gguf(write_gguf(rope_theta=500_000.0, tensors={"rope_freqs.weight": factors}), tmp_path / "tiny")
    assert read_config(path).rope_scaling == RopeScaling(kind="llama3", factor=8.0)


def test_tensor_is_named_when_rope_factors_are_not_llama3s(write_gguf: WriteGguf, tmp_path: Path) -> None:
    source = write_gguf(tensors={"rope_freqs.weight": np.array([1.0, 2.0, 3.0, 8.0], np.float32)})
    with pytest.raises(ModelLoadError, match=r"rope_freqs\.weight: does not match"):
        import_gguf(source, tmp_path / "tiny")


@pytest.mark.parametrize(
    ("changes", "field", "problem"),
    [
        ({"architecture": "qwen2"}, "general.architecture", "is 'qwen2'; supported: llama"),
        ({"pre": "default"}, "tokenizer.ggml.pre", "is 'default'; supported"),
        ({"strings": {"llama.rope.scaling.type": "yarn"}}, "llama.rope.scaling.type", "is 'yarn'"),
        ({"tensors": {"token_embd.weight": None}}, "token_embd.weight", "tensor is missing"),
        ({"tensors": {"blk.0.ffn_gate_exps.weight": np.zeros((4, 4), np.float32)}}, "blk.0.ffn_gate_exps.weight", "no"),
    ],
)
def test_field_is_named_and_nothing_left_when_refused(
    write_gguf: WriteGguf, tmp_path: Path, changes: dict[str, Any], field: str, problem: str
) -> None:
    source, cache = write_gguf(**changes), tmp_path / "cache"
    with pytest.raises(ModelLoadError) as caught:
        import_gguf(source, cache / "tiny")
    assert (caught.value.fields["file"], caught.value.fields["field"]) == ("tiny.gguf", field)
    assert problem in str(caught.value)
    assert [file.name for file in cache.iterdir()] == [".tiny.lock"]


def test_tensor_is_named_when_the_file_lacks_one(write_gguf: WriteGguf, tmp_path: Path) -> None:
    source = write_gguf(tensors={"blk.0.attn_norm.weight": None})
    with pytest.raises(ModelLoadError, match=r"model\.layers\.0\.input_layernorm\.weight: tensor is missing"):
        import_gguf(source, tmp_path / "tiny")
    assert not (tmp_path / "tiny").exists()


@pytest.mark.parametrize("keep", [0, 3, 100, 5000, -50])
def test_file_is_named_when_it_is_truncated(write_gguf: WriteGguf, tmp_path: Path, keep: int) -> None:
    source = write_gguf()
    source.write_bytes(source.read_bytes()[:keep])
    with pytest.raises(ModelLoadError, match=r"tiny\.gguf: header: is missing, truncated or not a GGUF file"):
        import_gguf(source, tmp_path / "tiny")


def test_import_runs_once_and_replaces_what_a_dead_one_left(write_gguf: WriteGguf, tmp_path: Path) -> None:
    source, target = write_gguf(), tmp_path / "tiny"
    leftover = tmp_path / ".tiny.part"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    assert import_gguf(source, target) == target
    assert not leftover.exists()
    inode = (target / SINGLE_FILE).stat().st_ino
    source.unlink()
    assert import_gguf(source, target) == target
    assert (target / SINGLE_FILE).stat().st_ino == inode


def test_nothing_is_left_when_writing_fails(
    write_gguf: WriteGguf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    cache = tmp_path / "cache"
    with pytest.raises(ModelLoadError, match="No space left on device"):
        import_gguf(write_gguf(), cache / "tiny")
    assert [file.name for file in cache.iterdir()] == [".tiny.lock"]


def test_lock_is_named_when_another_import_holds_it_too_long(
    write_gguf: WriteGguf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_import, "IMPORT_WAIT_S_MAX", -1.0)
    with (tmp_path / ".tiny.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ModelLoadError, match=r"\.tiny\.lock: lock: another process still imports it"):
            import_gguf(write_gguf(), tmp_path / "tiny")
    assert import_gguf(write_gguf(), tmp_path / "tiny").is_dir()


def _import_in_process(source: Path, target: Path, start: Any, inodes: Any) -> None:
    start.wait(timeout=60)
    inodes.put((import_gguf(source, target) / SINGLE_FILE).stat().st_ino)


@pytest.mark.process
def test_one_import_wins_when_processes_import_at_once(write_gguf: WriteGguf, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    start, inodes = context.Barrier(3), context.Queue()
    source, target = write_gguf(), tmp_path / "cache" / "tiny"
    processes = [context.Process(target=_import_in_process, args=(source, target, start, inodes)) for _ in range(3)]
    for process in processes:
        process.start()
    found = {inodes.get(timeout=60) for _ in processes}
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len(found) == 1


@pytest.mark.torch
def test_golden_prompt_ids_are_reproduced_by_the_bundled_models_tokenizer(smollm2: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    for item in GOLDEN["items"]:
        ids = tokenizer.encode(item["rendered_prompt"], add_special_tokens=False).ids
        assert ids == item["prompt_token_ids"]
    assert tokenizer.encode("1234").tokens == ["1", "2", "3", "4"]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.torch
def test_transformers_reads_the_bundled_models_tokenizer_the_same(smollm2: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = Tokenizer.from_file(str(smollm2 / "tokenizer.json")), AutoTokenizer.from_pretrained(smollm2)
    for text in TEXTS:
        assert theirs(text)["input_ids"] == ours.encode(text).ids
    for item in GOLDEN["items"]:
        messages = [{"role": "user", "content": item["prompt"]}]
        rendered = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert rendered == item["rendered_prompt"]
    assert (theirs.bos_token_id, theirs.eos_token_id) == (1, 2)


@pytest.mark.torch
@pytest.mark.slow
def test_golden_tokens_are_generated_when_transformers_runs_the_imported_model(smollm2: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    for item in GOLDEN["items"]:
        prompt = torch.tensor([item["prompt_token_ids"]])
        wanted = item["output_token_ids"]
        with torch.inference_mode():
            output = model.generate(prompt, max_new_tokens=len(wanted), do_sample=False, pad_token_id=2)
            scores = torch.log_softmax(model(output[:, :-1]).logits[0, prompt.shape[1] - 1 :].double(), dim=-1)
        assert output[0, prompt.shape[1] :].tolist() == wanted
        for position, top in enumerate(item["top5_logprobs_first10"]):
            for token, logprob in top:
                assert scores[position, token].item() == pytest.approx(logprob, abs=1e-3)


@pytest.mark.torch
@pytest.mark.slow
def test_weights_equal_transformers_own_when_it_reads_the_gguf(smollm2: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    from engine.model.catalog import find_bundled
    from engine.model.loader import load_weights

    source = find_bundled("smollm2")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(smollm2))
    theirs = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=model)["tensors"]
    ours = load_weights(smollm2, read_config(smollm2), torch.float32, torch.device("cpu"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
