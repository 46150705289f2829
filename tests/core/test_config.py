"""The YAML's rules, each error with its line, key and hint, and the configurations we ship."""

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from core.config import ClusterConfig, effective_config, is_loopback, load_config, parse_config
from core.errors import ConfigError

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
MINIMAL = "schema_version: 1\nname: demo\nmodel:\n  path: smollm2\n"


def parse(text: str, *overrides: str) -> ClusterConfig:
    return parse_config(text, file="a.yaml", overrides=overrides)


def problems_of(text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(text, *overrides)
    return [str(caught.value), *getattr(caught.value, "__notes__", [])]


def test_defaults_fill_in_when_the_file_is_minimal() -> None:
    config = parse(MINIMAL)
    assert config.mode == "disaggregated"
    assert (config.prefill.workers, config.decode.workers) == (1, 1)
    assert (config.kv.device_blocks, config.kv.device_gib) == (None, 1.0)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configuration_loads_when_nothing_is_overridden(path: Path) -> None:
    config = load_config(path)
    assert config.name == path.stem
    assert (config.prefill.workers == 0) == (config.mode == "colocated")


def test_effective_config_reads_back_equal_when_parsed_again() -> None:
    config = load_config(CONFIGS / "local.yaml", ["router.port=0", "model.max_model_len=512"])
    assert parse(effective_config(config)) == config


def test_config_is_immutable_when_loaded() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse(MINIMAL).name = "other"


def test_colocated_has_no_prefill_workers_when_they_are_not_given() -> None:
    assert parse(MINIMAL + "mode: colocated\nprefill: {cpus: 2}\n").prefill.workers == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("prefil:\n  workers: 1\n", "5: prefil: unknown key. Did you mean `prefill`?"),
        ("kv:\n  device_gib: 9\n  block_sise: 3\n", "7: kv.block_sise: unknown key. Did you mean `kv.block_size`?"),
        ("kv: {device_gib: 1, max_running: 3}\n", "5: kv.max_running: unknown key. Did you mean `decode.max_running`?"),
        ("ray:\n  zzz: 1\n", "6: ray.zzz: unknown key. Valid keys here: address, node_ip_address, port."),
        ("decode:\n  workers: two\n", "6: decode.workers: expected an integer, found the string 'two'"),
        ("decode:\n  workers: 2.0\n", "6: decode.workers: expected an integer, found 2.0"),
        ("decode:\n  workers: yes\n", "6: decode.workers: expected an integer, found the boolean true"),
        ("decode:\n  workers:\n", "6: decode.workers: expected an integer, found nothing"),
        ("decode:\n  workers: 0\n", "6: decode.workers: must be greater than or equal to 1, found 0"),
        ("decode:\n  gpus: .inf\n", "6: decode.gpus: expected a finite number, found inf"),
        ("router: 5\n", "5: router: expected a section of keys and values, found 5"),
        ("numerics: exakt\n", "5: numerics: must be 'exact' or 'fast', not the string 'exakt'"),
        ("name: again\n", "5: name: given twice, first in line 2"),
        ("kv: &k {block_size: 4}\nray: *k\n", "6: ray: anchors and aliases are not supported. Write the value out."),
        ("kv: &k {block_size: *k}\n", "5: kv.block_size: anchors and aliases are not supported. Write the value out."),
        ("ray: {port: 2020-13-45}\n", "5: ray.port: '2020-13-45' is not a valid value: month must be in 1..12"),
        ("kv: [1\n", "6: YAML: expected ',' or ']', but got '<stream end>'"),
    ],
)
def test_error_names_line_key_and_hint_when_a_key_or_type_is_wrong(text: str, expected: str) -> None:
    assert problems_of(MINIMAL + text) == [f"a.yaml:{expected}"]


@pytest.mark.parametrize(
    ("text", "key", "part"),
    [
        ("prefill: {workers: 0}", "prefill.workers", "needs at least one prefill worker"),
        ("mode: colocated\nprefill: {workers: 1}", "prefill.workers", "colocated mode has no prefill workers"),
        ("kv: {block_size: 16}", "kv", "exactly one of device_blocks and device_gib"),
        ("kv: {device_blocks: 9, device_gib: 1}", "kv", "exactly one of device_blocks and device_gib"),
        ("decode: {gpus: 1}", "decode.gpus", "model.device is cpu"),
        ("prefill: {gpus: 0.5}", "prefill.gpus", "model.device is cpu"),
        ("decode: {max_batched_tokens: 15, max_running: 1}", "decode.max_batched_tokens", "one block of 16"),
        ("prefill: {max_batched_tokens: 15}", "prefill.max_batched_tokens", "one block of 16"),
        ("decode: {max_batched_tokens: 16, max_running: 17}", "decode.max_batched_tokens", "decode.max_running (17)"),
        ("kv: {device_blocks: 4}", "model.max_model_len", "4 blocks of 16 hold 64"),
        ("router: {processes: 2, port: 0}", "router.port", "cannot be chosen at start"),
        ("router: {host: 0.0.0.0}", "router.host", "cluster secret"),
        ("ray: {node_ip_address: 10.1.2.3}", "ray.node_ip_address", "cluster secret"),
    ],
)
def test_combination_is_refused_when_it_cannot_work(text: str, key: str, part: str) -> None:
    (problem,) = problems_of(MINIMAL + "  device: cpu\n  max_model_len: 65\n" + text + "\n")
    assert f": {key}: " in problem
    assert part in problem


def test_gpu_is_required_of_every_role_when_the_device_is_cuda() -> None:
    assert len(problems_of(MINIMAL + "  device: cuda\n")) == 2
    assert parse(MINIMAL + "  device: cuda\n", "decode.gpus=0.5", "prefill.gpus=0.5").decode.gpus == 0.5
    assert parse(MINIMAL + "  device: cuda\nmode: colocated\n", "decode.gpus=1").decode.gpus == 1


def test_all_problems_are_reported_in_order_of_line_when_there_are_several() -> None:
    found = problems_of("schema_version: 1\nname: A_b\nmodel: {}\nkv: {device_blocks: -1}\n", "router.port=99999")
    assert [problem.partition(": ")[0] for problem in found] == ["a.yaml:2", "a.yaml:3", "a.yaml:4", "--set:1"]


@pytest.mark.parametrize(
    ("version", "part"),
    [("", "is required"), ("schema_version: 2", "2 is not"), ("schema_version: true", "True is not")],
)
def test_only_the_version_is_reported_when_it_is_not_supported(version: str, part: str) -> None:
    (problem,) = problems_of(f"{version}\nname: A_b\n")
    assert part in problem
    assert "reads schema_version: 1" in problem


@pytest.mark.parametrize(
    "text",
    ["", "- a\n", "just text\n", "x: 1\n---\ny: 2\n", "\x00", "? *a\n: 3\n", "a: !!python/object/apply:os.getcwd []"],
)
def test_text_is_refused_when_it_is_no_plain_mapping(text: str) -> None:
    assert len(problems_of(text)) == 1


@given(st.text(max_size=60))
def test_any_text_is_parsed_or_refused_when_it_follows_a_valid_file(text: str) -> None:
    try:
        parse(MINIMAL + text)
    except ConfigError as error:
        assert str(error).startswith("a.yaml:")


def test_override_wins_and_is_typed_when_it_replaces_or_adds_a_key() -> None:
    config = parse(MINIMAL, "prefill.workers=3", "kv.device_gib=0.5", "model.max_model_len=null", "name=other")
    assert (config.prefill.workers, config.kv.device_gib, config.name) == (3, 0.5, "other")
    assert config.model.max_model_len is None


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("prefill.workers", "must look like path=value"),
        ("=1", "must look like path=value"),
        ("a..b=1", "must look like path=value"),
        ("name.x=1", "'name' is not a section"),
        ("kv.block_size=[1]", "not a mapping or a list"),
        ("kv.block_size='", "is not a YAML scalar"),
        ("prefill.wrkers=2", "Did you mean `prefill.workers`?"),
        ("prefill.workers=many", "expected an integer, found the string 'many'"),
    ],
)
def test_override_is_refused_by_path_when_it_is_wrong(override: str, part: str) -> None:
    (problem,) = problems_of(MINIMAL, "router.port=8001", override)
    assert problem.startswith(f"--set:2: {override.partition('=')[0]}")
    assert part in problem


def test_file_is_refused_when_it_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.yaml:0: file: cannot be read: No such file"):
        load_config(tmp_path / "gone.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9\n")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        load_config(tmp_path / "latin.yaml")


def test_pool_is_counted_in_blocks_when_given_in_gib() -> None:
    assert parse(MINIMAL, "kv.device_gib=0.5").kv.num_blocks(737_280) == 728
    assert parse(MINIMAL + "kv: {device_blocks: 7}\n").kv.num_blocks(737_280) == 7


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_host_is_loopback_when_it_never_leaves_the_machine(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "example.org", ""])
def test_host_is_not_loopback_when_others_may_reach_it(host: str) -> None:
    assert not is_loopback(host)


def test_every_key_is_documented_with_its_default_when_listed() -> None:
    rows = re.findall(r"^\| `([a-z_.]+)` \| (\S+)", (ROOT / "docs/configuration.md").read_text(), re.MULTILINE)
    documented = {key: default.strip("`,") for key, default in rows}
    defaults: dict[str, str] = {}
    for name, value in parse(MINIMAL).model_dump().items():
        fields = {f"{name}.{key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value}
        defaults |= {key: yaml.safe_dump(one).splitlines()[0] for key, one in fields.items()}
    required = {"schema_version": "required", "name": "required", "model.path": "required"}
    assert documented == defaults | required
