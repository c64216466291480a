"""config.json: the real one and the goldens' are read; everything else is refused by field, all problems at once."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3ray.workers.checkpoint.synthetic_spec import SyntheticSpec, encode_config
from k3ray.workers.model.config import ConfigError, ModelConfig, read_config, unknown_fields, unknown_line
from k3ray.workers.model.config_without_effect import WITHOUT_EFFECT

JsonObject = dict[str, Any]


@pytest.fixture(scope="module")
def released(k3b_dir: Path) -> JsonObject:
    """The golden's config, which has every field of the released one."""
    document: JsonObject = json.loads((k3b_dir / "config.json").read_bytes())
    return document


def changed(document: JsonObject, place: str, value: Any = None, remove: bool = False) -> JsonObject:
    """A copy of the document with one dotted place set or removed."""
    result = copy.deepcopy(document)
    *path, key = place.split("/")
    inner = result
    for step in path:
        inner = inner[step]
    if remove:
        del inner[key]
    else:
        inner[key] = value
    return result


def flat(document: JsonObject) -> JsonObject:
    """The same config with everything at the top."""
    text = dict(document["text_config"])
    return text | text.pop("linear_attn_config")


def read_text(folder: Path, text: str | bytes) -> ModelConfig:
    (folder / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_config(folder)


def refusal(folder: Path, document: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        read_text(folder, json.dumps(document))
    assert caught.value.exit_code == 2
    return caught.value


def only_problem(folder: Path, document: object) -> str:
    problems = refusal(folder, document).problems
    assert len(problems) == 1, problems
    return problems[0]


def test_released_config_gives_the_published_sizes(shared_data: Path) -> None:
    config = read_config(shared_data / "k3-release" / "config.json")
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (7168, 93, 163840)
    assert (config.kda_num_heads, config.kda_head_dim, config.conv_kernel_size) == (96, 128, 4)
    assert (config.q_lora_rank, config.kv_lora_rank) == (1536, 512)
    assert (config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim) == (128, 64, 128)
    assert (config.num_experts, config.num_experts_per_token, config.num_shared_experts) == (896, 16, 2)
    assert (config.routed_expert_hidden_size, config.moe_intermediate_size) == (3584, 3072)
    assert (config.intermediate_size, config.attn_res_block_size) == (33792, 12)
    assert (config.situ_beta, config.situ_linear_beta, config.gate_lower_bound) == (4.0, 25.0, -5.0)
    assert (config.rms_norm_eps, config.latent_norm_eps) == (1e-5, 1e-6)
    assert config.eos_token_id == (163586,)
    assert config.mla_layers == (*range(3, 92, 4), 92)
    assert len(config.kda_layers) == 69
    assert not config.is_moe(0)
    assert config.is_moe(1)
    assert config.is_mla(92)
    assert config.is_mla(91)
    assert not config.is_mla(90)


def test_golden_configs_are_zero_based_like_their_readmes(k3a_dir: Path, k3b_dir: Path) -> None:
    assert read_config(k3b_dir).mla_layers == (3, 7, 8)
    assert read_config(k3b_dir).kda_layers == (0, 1, 2, 4, 5, 6)
    assert read_config(k3a_dir).mla_layers == (3, 7, 11, 12)


def test_flat_file_is_the_same_config(tmp_path: Path, released: JsonObject, k3b_dir: Path) -> None:
    assert read_text(tmp_path, json.dumps(flat(released))) == read_config(k3b_dir)
    half_flat = dict(released["text_config"])
    assert read_text(tmp_path, json.dumps(half_flat)) == read_config(k3b_dir)


def test_equal_values_in_two_places_are_one_value(tmp_path: Path, released: JsonObject, k3b_dir: Path) -> None:
    assert read_text(tmp_path, json.dumps(flat(released) | released)) == read_config(k3b_dir)


@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_size", 4096), ("tie_word_embeddings", True), ("eos_token_id", 7), ("head_dim", 72), ("mla_use_nope", 1)],
)
def test_different_values_in_two_places_are_refused(
    tmp_path: Path, released: JsonObject, key: str, value: object
) -> None:
    problem = only_problem(tmp_path, released | {key: value})
    assert f"{key} and {key}: found" in problem
    assert json.dumps(value) in problem
    assert "one value in both places" in problem


def required_fields(document: JsonObject) -> list[str]:
    """Every place the reader reads, found by leaving each field of the file out and seeing whether it is missed."""
    fields = [f"text_config/{key}" for key in document["text_config"] if key != "linear_attn_config"]
    return fields + [f"text_config/linear_attn_config/{key}" for key in document["text_config"]["linear_attn_config"]]


def test_every_used_field_is_required(tmp_path: Path, released: JsonObject) -> None:
    missed = set()
    for place in required_fields(released):
        document = changed(released, place, remove=True)
        document.pop("eos_token_id")  # the top level repeats these two
        document.pop("tie_word_embeddings")
        try:
            read_text(tmp_path, json.dumps(document))
        except ConfigError as error:
            name = place.replace("/", ".")
            assert error.problems[0].startswith(f"{name}: found nothing, expected"), (place, error.problems)
            missed.add(place.split("/")[-1])
    sizes = {field.name for field in dataclasses.fields(ModelConfig)}
    in_file = {"kda_num_heads": "num_heads", "kda_head_dim": "head_dim", "conv_kernel_size": "short_conv_kernel_size"}
    in_file |= {"situ_beta": "activation_situ_beta", "situ_linear_beta": "activation_situ_linear_beta"}
    in_file |= {"mla_layers": "full_attn_layers"}
    assert {in_file.get(name, name) for name in sizes} <= missed
    released_values = {"hidden_act", "moe_router_activation_func", "mla_use_nope", "mla_use_output_gate"}
    released_values |= {"use_full_rank_gate", "num_expert_group", "topk_group", "moe_layer_freq", "tie_word_embeddings"}
    released_values |= {"num_nextn_predict_layers", "num_key_value_heads", "quantization_config"}
    assert released_values <= missed


@pytest.mark.parametrize(
    "value", [True, 160.0, "160", None, [160], {}, -160, 0, 2**63, 10**400, float("nan"), float("inf")]
)
@pytest.mark.parametrize("key", ["hidden_size", "num_experts", "moe_intermediate_size", "num_hidden_layers"])
def test_sizes_of_a_wrong_type_or_range_are_refused(
    tmp_path: Path, released: JsonObject, key: str, value: object
) -> None:
    error = refusal(tmp_path, changed(released, f"text_config/{key}", value))
    if isinstance(value, float) and value != 160.0:
        assert "invalid JSON" in str(error)
    else:
        assert any(problem.startswith(f"text_config.{key}: found") for problem in error.problems)


@pytest.mark.parametrize("value", [True, "1e-5", None, [1e-5], 0.0, -1e-5, 10**400])
@pytest.mark.parametrize("key", ["rms_norm_eps", "activation_situ_beta", "routed_scaling_factor"])
def test_numbers_of_a_wrong_type_or_range_are_refused(
    tmp_path: Path, released: JsonObject, key: str, value: object
) -> None:
    assert f"text_config.{key}: found" in only_problem(tmp_path, changed(released, f"text_config/{key}", value))


def test_an_infinite_number_is_refused(tmp_path: Path, released: JsonObject) -> None:
    text = json.dumps(released).replace('"rms_norm_eps": 1e-05', '"rms_norm_eps": 1e999')
    with pytest.raises(ConfigError, match=r"rms_norm_eps: found Infinity, expected a finite number above 0"):
        read_text(tmp_path, text)


@pytest.mark.parametrize("value", [0, 1, "true", None, 1.0])
@pytest.mark.parametrize("key", ["moe_renormalize", "latent_moe_use_norm"])
def test_flags_are_true_or_false(tmp_path: Path, released: JsonObject, key: str, value: object) -> None:
    assert f"text_config.{key}: found" in only_problem(tmp_path, changed(released, f"text_config/{key}", value))


def test_fields_that_vary_are_honoured(tmp_path: Path, released: JsonObject) -> None:
    text = released["text_config"] | {
        "moe_renormalize": False,
        "routed_scaling_factor": 2,
        "latent_moe_use_norm": False,
        "num_shared_experts": 3,
        "first_k_dense_replace": 2,
        "activation_situ_beta": 5.5,
        "rms_norm_eps": 1e-6,
    }
    config = read_text(tmp_path, json.dumps(released | {"text_config": text}))
    assert (config.moe_renormalize, config.latent_moe_use_norm) == (False, False)
    assert (config.routed_scaling_factor, config.situ_beta, config.rms_norm_eps) == (2.0, 5.5, 1e-6)
    assert (config.num_shared_experts, config.first_k_dense_replace) == (3, 2)
    assert config.moe_layers == range(2, 9)
    assert config.shared_intermediate_size == 96


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("hidden_act", "silu"),
        ("moe_router_activation_func", "softmax"),
        ("mla_use_nope", False),
        ("mla_use_output_gate", False),
        ("linear_attn_config/use_full_rank_gate", False),
        ("num_expert_group", 4),
        ("num_expert_group", True),
        ("topk_group", 2),
        ("moe_layer_freq", 2),
        ("moe_layer_freq", 1.0),
        ("num_nextn_predict_layers", 1),
        ("num_nextn_predict_layers", False),
        ("num_key_value_heads", 1),
        ("topk_method", "greedy"),
        ("pruned_heads", {"0": [1]}),
        ("model_type", "deepseek_v3"),
        ("num_experts_per_token", 0),
        ("num_experts_per_token", -1),
        ("num_experts_per_token", 17),
        ("first_k_dense_replace", 10),
        ("routed_expert_hidden_size", 100),
        ("moe_intermediate_size", 48),
        ("linear_attn_config/gate_lower_bound", 5.0),
        ("quantization_config/format", "pack-quantized"),
        ("quantization_config/quant_method", "fp8"),
        ("quantization_config/transform_config", {"config_groups": {}}),
        ("quantization_config/sparsity_config", {"format": "dense"}),
        ("quantization_config/config_groups", {}),
        ("quantization_config/config_groups/group_0/weights", None),
        ("quantization_config/config_groups/group_0/weights/group_size", 16),
        ("quantization_config/config_groups/group_0/weights/num_bits", 8),
        ("quantization_config/config_groups/group_0/weights/type", "int"),
        ("quantization_config/config_groups/group_0/weights/symmetric", False),
        ("quantization_config/config_groups/group_0/weights/strategy", "channel"),
        ("quantization_config/config_groups/group_0/input_activations", {"num_bits": 8}),
    ],
)
def test_another_model_is_refused_by_name(tmp_path: Path, released: JsonObject, place: str, value: object) -> None:
    problem = only_problem(tmp_path, changed(released, f"text_config/{place}", value))
    assert problem.startswith(f"text_config.{place.replace('/', '.')}: found ")
    assert ", expected " in problem


def test_tied_embeddings_are_refused(tmp_path: Path, released: JsonObject) -> None:
    document = changed(released, "text_config/tie_word_embeddings", True) | {"tie_word_embeddings": True}
    assert "tie_word_embeddings: found true, expected false" in only_problem(tmp_path, document)


@pytest.mark.parametrize(
    ("full", "kda", "words"),
    [
        ([3, 7, 8], [0, 1, 2, 4, 5, 6], "a zero-based list (0..8), expected the one-based list 1..9"),
        ([4, 8, 10], [1, 2, 3, 5, 6, 7, 9], "found [10], expected one-based layer numbers 1..9"),
        ([0, 4, 8], [1, 2, 3, 5, 6, 7, 9], "found [0], expected one-based layer numbers 1..9"),
        ([4, 8, 9, -1], [1, 2, 3, 5, 6, 7], "found [-1], expected one-based"),
        ([4, 8, 9, 4], [1, 2, 3, 5, 6, 7], "found [4] more than once"),
        ([4, 8, 9, 1], [1, 2, 3, 5, 6, 7], "layers [1] in both"),
        ([4, 8], [1, 2, 3, 5, 6, 7], "layers [9] in neither"),
        ([], [], "in neither"),
        ([True, 4, 8], [2, 3, 5, 6, 7, 9], "expected a list of whole numbers"),
        ([4.0, 8, 9], [1, 2, 3, 5, 6, 7], "expected a list of whole numbers"),
        ("4,8,9", [1, 2, 3, 5, 6, 7], "expected a list of whole numbers"),
    ],
)
def test_layer_lists_must_be_a_one_based_partition(
    tmp_path: Path, released: JsonObject, full: object, kda: object, words: str
) -> None:
    document = changed(released, "text_config/linear_attn_config/full_attn_layers", full)
    error = refusal(tmp_path, changed(document, "text_config/linear_attn_config/kda_layers", kda))
    assert any(words in problem for problem in error.problems), error.problems


def test_layer_lists_may_be_in_any_order(tmp_path: Path, released: JsonObject) -> None:
    config = read_text(
        tmp_path, json.dumps(changed(released, "text_config/linear_attn_config/full_attn_layers", [9, 4, 8]))
    )
    assert config.mla_layers == (3, 7, 8)


@pytest.mark.parametrize(("value", "ids"), [(482, (482,)), ([482, 481], (482, 481)), ([0], (0,))])
def test_end_of_message_ids(tmp_path: Path, released: JsonObject, value: object, ids: tuple[int, ...]) -> None:
    document = changed(released, "text_config/eos_token_id", value) | {"eos_token_id": value}
    assert read_text(tmp_path, json.dumps(document)).eos_token_id == ids


@pytest.mark.parametrize("value", [512, -1, True, "482", [], [482, "x"], [[482]], 482.0])
def test_end_of_message_ids_outside_the_vocabulary_are_refused(
    tmp_path: Path, released: JsonObject, value: object
) -> None:
    document = changed(released, "text_config/eos_token_id", value) | {"eos_token_id": value}
    assert "eos_token_id: found" in only_problem(tmp_path, document)


def test_all_problems_come_in_one_message(tmp_path: Path, released: JsonObject) -> None:
    document = changed(released, "text_config/hidden_size", "160")
    document = changed(document, "text_config/hidden_act", "silu")
    document = changed(document, "text_config/linear_attn_config/head_dim", remove=True)
    error = refusal(tmp_path, document)
    assert len(error.problems) == 3
    lines = str(error).splitlines()
    assert lines[0].startswith(f"{tmp_path / 'config.json'}: 3 problems")
    assert '  config.json: text_config.hidden_size: found "160" (a string), expected a whole number' in lines[1]
    assert "text_config.linear_attn_config.head_dim: found nothing, expected" in lines[2]
    assert 'text_config.hidden_act: found "silu" (a string), expected "situ"' in lines[3]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "invalid JSON"),
        (b"{", "invalid JSON"),
        (b"[1]", "found [1], expected a JSON object"),
        (b"null", "expected a JSON object"),
        (b"\xff\xfe{}", "invalid JSON"),
        (b'{"a": ' * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "invalid JSON"),
        (b'{"text_config": 3}', "text_config: found 3, expected an object"),
        (b'{"text_config": {"linear_attn_config": []}}', "linear_attn_config: found [], expected an object"),
        (b'{"hidden_size": 1, "hidden_size": 1}', '"hidden_size": found the key 2 times in one object'),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, text: bytes, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_text(tmp_path, text)
    assert words in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.*No such file.*expected the checkpoint's config\.json"):
        read_config(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"config\.json: 1 problem"):
        read_config(tmp_path)


def test_truncated_keeps_the_first_layers(k3b_dir: Path) -> None:
    config = read_config(k3b_dir)
    short = config.truncated(5)
    assert (short.num_hidden_layers, short.mla_layers, short.kda_layers) == (5, (3,), (0, 1, 2, 4))
    assert config.truncated(9) == config
    for layers in (0, -1, 10):
        with pytest.raises(ConfigError, match=f"found {layers}, expected a number of layers from 1 to 9"):
            config.truncated(layers)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_value_in_any_field_is_a_refusal_or_a_config(
    data: st.DataObject, released: JsonObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = data.draw(st.sampled_from([*required_fields(released), "text_config", "text_config/linear_attn_config"]))
    folder = tmp_path_factory.mktemp("config")
    try:
        read_text(folder, json.dumps(changed(released, place, data.draw(JSON_VALUES))))
    except ConfigError as error:
        assert error.problems  # and never another exception


def leaves(document: JsonObject, place: tuple[str, ...] = ()) -> list[tuple[str, object]]:
    """Every field of the file that holds no object of its own, by its place."""
    found: list[tuple[str, object]] = []
    for key, value in document.items():
        inner = isinstance(value, dict) and value
        found += leaves(value, (*place, key)) if inner else [("/".join((*place, key)), value)]
    return found


def others(value: object) -> list[object]:
    """Other values of the same kind, and of another one."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value + 1, value * 2 + 1, -1]
    if isinstance(value, list):
        return [value[:-1], [*value, *value[-1:]]]
    return ["other", {"a": 1}]


def test_no_field_is_ignored_without_a_reason(tmp_path: Path, released: JsonObject, k3b_dir: Path) -> None:
    """Each field changed alone is refused, or changes the record, or is in the list of fields without effect."""
    record, silent = read_config(k3b_dir), set()
    for place, value in leaves(released):
        for other in others(value):
            document = changed(released, place, other)
            try:
                same = read_text(tmp_path, json.dumps(document)) == record
            except ConfigError:
                continue
            if same and other != value:
                silent.add(place)
    names = {place.removeprefix("text_config/").split("/")[0] for place in silent}
    assert names - WITHOUT_EFFECT == {"quantization_config"}
    inside = {place.rpartition("/")[2] for place in silent if "quantization_config" in place}
    assert inside == {
        "global_compression_ratio",
        "ignore",
        "observer",
        "observer_kwargs",
        "quantization_status",
        "targets",
    }


def test_a_field_that_nobody_knows_is_told(tmp_path: Path, released: JsonObject, k3b_dir: Path) -> None:
    assert unknown_fields(k3b_dir) == () and unknown_line(k3b_dir) == ""
    document = changed(released, "text_config/attn_logit_softcapping", 30.0) | {"rope_scaling": None}
    document = changed(document, "text_config/linear_attn_config/gate_kind", "exp")
    read_text(tmp_path, json.dumps(document))
    places = ("rope_scaling", "text_config.attn_logit_softcapping", "text_config.linear_attn_config.gate_kind")
    assert unknown_fields(tmp_path) == places
    assert ", ".join(places) in unknown_line(tmp_path)
    read_text(tmp_path, json.dumps(flat(document) | {f"new_{number}": 1 for number in range(9)}))
    assert "and 3 more" in unknown_line(tmp_path)


def test_a_made_config_has_known_fields_only(tmp_path: Path) -> None:
    read_text(tmp_path, encode_config(SyntheticSpec()))
    assert unknown_fields(tmp_path) == ()
