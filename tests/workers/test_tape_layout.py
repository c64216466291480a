"""The tape's layout: every row once, in the order of use, whole rows in whole pages, cut at layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3ray.workers.checkpoint import shapes
from k3ray.workers.model.config import ModelConfig, read_config
from k3ray.workers.tape.layout import ChunkSizeFailure, TapeLayout, plan_layout
from k3ray.workers.tape.order import KV_B, tape_tensors

PAGE = 4096


@pytest.fixture(scope="module")
def config(k3b_dir: Path) -> ModelConfig:
    return read_config(k3b_dir)


def check(layout: TapeLayout) -> None:
    """Whatever the widths: every row of every tensor once and in order, nothing overlaps, nothing straddles."""
    rows_seen = [0] * len(layout.tensors)
    end, last_tensor = 0, 0
    for chunk in layout.chunks:
        assert chunk.offset == end
        assert chunk.offset % PAGE == 0 and chunk.nbytes % PAGE == 0 and 0 < chunk.nbytes <= layout.chunk_bytes
        end += chunk.nbytes
        used = 0
        for segment in chunk.segments:
            tensor = layout.tensors[segment.tensor]
            assert tensor.layer == chunk.layer
            assert segment.tensor >= last_tensor and segment.rows > 0
            assert segment.first_row == rows_seen[segment.tensor]
            assert segment.offset >= used and segment.offset % PAGE == 0
            rows_seen[segment.tensor] += segment.rows
            used, last_tensor = segment.offset + segment.rows * tensor.row_bytes, segment.tensor
        assert used <= chunk.nbytes
    assert rows_seen == [tensor.rows for tensor in layout.tensors]
    assert layout.total_bytes == end


def pieces(layout: TapeLayout, number: int) -> list[tuple[int, int]]:
    """(begin, end) on the tape of every piece of a tensor."""
    return [
        (begin := chunk.offset + segment.offset, begin + segment.rows * layout.tensors[number].row_bytes)
        for chunk in layout.chunks
        for segment in chunk.segments
        if segment.tensor == number
    ]


@settings(max_examples=60)
@given(
    widths=st.tuples(*[st.integers(1, 300)] * 6),
    vocab=st.integers(1, 5000),
    pages=st.integers(1, 40),
)
def test_any_widths_in_any_chunk(config: ModelConfig, widths: tuple[int, ...], vocab: int, pages: int) -> None:
    names = ("hidden_size", "kda_head_dim", "q_lora_rank", "kv_lora_rank", "v_head_dim", "intermediate_size")
    changed = replace(config, **dict(zip(names, widths, strict=True)), vocab_size=vocab)
    widest = max(tensor.row_bytes for tensor in tape_tensors(changed))
    if widest > pages * PAGE:
        with pytest.raises(ChunkSizeFailure, match=f"from {-(-widest // PAGE) * PAGE}, one row of layer"):
            plan_layout(changed, pages * PAGE)
    else:
        check(plan_layout(changed, pages * PAGE))


def test_the_released_widths_waste_nothing_and_cut_no_matrix_apart(shared_data: Path) -> None:
    released = read_config(shared_data / "k3-release")
    layout = plan_layout(released, 64 << 20)
    check(layout)
    assert layout.padding_bytes < layout.total_bytes // 1_000_000
    for number in range(len(layout.tensors)):
        runs = pieces(layout, number)
        assert [end for _, end in runs[:-1]] == [begin for begin, _ in runs[1:]]


def test_a_matrix_is_cut_where_its_rows_end_on_a_page(config: ModelConfig) -> None:
    layout = plan_layout(config, 64 << 10)
    cut = 0
    for number in range(len(layout.tensors)):
        runs = pieces(layout, number)
        assert [end for _, end in runs[:-1]] == [begin for begin, _ in runs[1:]]
        cut += len(runs) > 1
    assert cut > 10


def test_every_matrix_of_the_model_is_on_the_tape_and_no_vector(config: ModelConfig) -> None:
    on_tape = {(tensor.layer, tensor.short): (tensor.rows, tensor.columns) for tensor in tape_tensors(config)}
    expected = {(config.num_hidden_layers, "lm_head.weight"): (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_hidden_layers):
        for short, (dtype, shape) in shapes.layer_tensors(config, layer).items():
            if len(shape) == 2 and dtype == "BF16" and shape[0] > 1:
                expected[layer, short] = shape
    assert on_tape == expected
    assert sum(short == KV_B for _, short in on_tape) == len(config.mla_layers)


def test_a_model_without_shared_experts_has_none_on_the_tape(config: ModelConfig) -> None:
    names = {tensor.short for tensor in tape_tensors(replace(config, num_shared_experts=0))}
    assert not any("shared" in name for name in names)
    assert "block_sparse_moe.routed_expert_up_proj.weight" in names


def test_stages_cut_the_tape_at_layers(config: ModelConfig) -> None:
    layout = plan_layout(config, 32 << 10)
    layers = config.num_hidden_layers
    for cut in range(1, layers):
        both = layout.chunks_of(0, cut, False) + layout.chunks_of(cut, layers, True)
        assert both == tuple(range(len(layout.chunks)))
    first_and_head = layout.chunks_of(0, 1, True)  # a run of the first layer only
    assert {layout.chunks[number].layer for number in first_and_head} == {0, layout.head_layer}


@pytest.mark.parametrize("chunk_bytes", [0, 1, 4095, 4097, -4096, 1 << 31])
def test_chunks_that_are_no_pages_are_refused(config: ModelConfig, chunk_bytes: int) -> None:
    with pytest.raises(ChunkSizeFailure, match="expected a multiple of 4096"):
        plan_layout(config, chunk_bytes)
