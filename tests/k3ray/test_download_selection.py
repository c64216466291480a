"""Which files are needed, and the published sizes that travel with the package."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from k3ray.download import workplace as workplace_module
from k3ray.download.checksums import Checksum
from k3ray.download.hub import HubFile, Listing
from k3ray.download.release import ReleaseError, is_released, read_release
from k3ray.download.selection import SelectionError, all_shards, map_shards, parse_layers, small_files
from k3ray.workers.checkpoint.index_file import read_index_file
from k3ray.workers.model.config import read_config

SHA = Checksum("sha256", "ab" * 32)
COMMIT = "9f62e4e9fffbd0a83ddd60e1c209d828994b3569"


def test_layers_are_found_by_the_index_and_never_by_the_shards_number(k3b_dir: Path) -> None:
    """The golden checkpoint keeps layers in a shard together and some experts apart."""
    import json

    shard_map = map_shards(read_index_file(k3b_dir / "model.safetensors.index.json"))
    weights = json.loads((k3b_dir / "model.safetensors.index.json").read_text())["weight_map"]
    assert sorted(shard_map.by_layer) == list(range(9))
    for layer in range(9):
        expected = {shard for name, shard in weights.items() if f".layers.{layer}." in name and "vision" not in name}
        assert shard_map.holding(range(layer, layer + 1)) == expected
    assert shard_map.top == {
        weights[f"language_model.{name}"]
        for name in ("lm_head.weight", "model.norm.weight", "model.embed_tokens.weight")
    }
    assert shard_map.complete_layers(frozenset(shard_map.shards)) == list(range(9))
    assert shard_map.complete_layers(frozenset()) == []


def test_the_released_index_puts_one_layer_in_one_shard(shared_data: Path) -> None:
    index = read_index_file(shared_data / "k3-release" / "model.safetensors.index.json.gz")
    shard_map = map_shards(index)
    for layer in range(93):
        assert shard_map.by_layer[layer] == {f"model-{layer + 1:05d}-of-000096.safetensors"}
    assert shard_map.top == {"model-00094-of-000096.safetensors"}
    assert is_released(read_release(), read_config(shared_data / "k3-release"), index)


@pytest.mark.parametrize("text", ["", "a", "3-1", "-1", "1-", "1-2-3", "1.5", "٣", "0-100000000"])
def test_layers_that_are_none(text: str) -> None:
    with pytest.raises(SelectionError, match="expected A-B"):
        parse_layers(text)
    assert (parse_layers("3"), parse_layers("0-92")) == (range(3, 4), range(93))


def listing(*names: str) -> Listing:
    return Listing("some/one", COMMIT, {name: HubFile(name, 5, SHA) for name in names})


def test_only_the_files_that_are_needed() -> None:
    everything = listing("README.md", "config.json", "modeling_kimi.py", "tiktoken.model", "tokenizer_config.json",
                         "model.safetensors.index.json", "a.safetensors", "generation_config.json")  # fmt: skip
    assert small_files(everything, True) == ["tiktoken.model", "tokenizer_config.json"]
    whole = ["config.json", "tiktoken.model", "tokenizer_config.json", "generation_config.json"]
    assert small_files(everything, False) == [*whole, "model.safetensors.index.json"]
    assert all_shards(everything, None) == {"a.safetensors"}
    with pytest.raises(SelectionError, match=r"has no config\.json"):
        small_files(listing("tiktoken.model"), False)
    with pytest.raises(SelectionError, match=r"has no tiktoken\.model"):
        small_files(listing("config.json"), True)
    with pytest.raises(SelectionError, match=r"has no \.safetensors file"):
        all_shards(listing("config.json"), None)


def test_a_shard_that_the_index_names_and_the_repository_lacks(k3b_dir: Path) -> None:
    shard_map = map_shards(read_index_file(k3b_dir / "model.safetensors.index.json"))
    with pytest.raises(SelectionError, match=r"names 5 shards, 4 of which.*model-00002-of-000005"):
        all_shards(listing("model-00001-of-000005.safetensors"), shard_map)


def test_the_shipped_sizes_are_the_published_ones(shared_data: Path) -> None:
    release = read_release()
    lines = (shared_data / "k3-release" / "shard_sizes.txt").read_text().split()
    assert release.sizes == dict(zip(lines[::2], map(int, lines[1::2]), strict=True))
    assert (release.file_bytes, len(release.sizes), release.revision) == (1_560_936_091_448, 96, COMMIT)
    with gzip.open(shared_data / "k3-release" / "model.safetensors.index.json.gz") as file:
        import json

        assert json.load(file)["metadata"]["total_size"] == release.tensor_bytes


def test_a_damaged_list_of_sizes_is_refused(tmp_path: Path) -> None:
    text = (Path(workplace_module.__file__).with_name("release.txt")).read_text()
    for wrong in (text.replace("shard 7 16990911504", "shard 7 16990911505"), text[:-20], "", text + "shard 97 1\n"):
        (tmp_path / "release.txt").write_text(wrong)
        with pytest.raises(ReleaseError, match="install k3ray again"):
            read_release(tmp_path / "release.txt")


def test_another_checkpoint_is_not_the_release(k3b_dir: Path) -> None:
    index = read_index_file(k3b_dir / "model.safetensors.index.json")
    release, config = read_release(), read_config(k3b_dir)
    assert not is_released(release, config, index)
    assert not is_released(release, config, None) and not is_released(release, None, index)
    assert not is_released(release, None, None)
