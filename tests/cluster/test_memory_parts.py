"""The arithmetic of parts against arrays that exist: state to the byte, a step's arrays against what numpy took."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from k3ray.cluster import memory_parts
from k3ray.workers.checkpoint.shapes import layer_tensors
from k3ray.workers.checkpoint.synthetic import write_checkpoint
from k3ray.workers.checkpoint.synthetic_spec import SyntheticSpec
from k3ray.workers.frames import ActivationFrame, encode_activations
from k3ray.workers.loading import CheckpointSpec, StageSpec, load_stage
from k3ray.workers.model.config import ModelConfig, read_config
from k3ray.workers.model.state import KdaState, new_sequence
from k3ray.workers.tape.order import tape_tensors

WIDTHS = {
    "small": SyntheticSpec(),
    "KDA": SyntheticSpec(hidden_size=256, kda_num_heads=24, kda_head_dim=64),
    "MLA": SyntheticSpec(num_attention_heads=24, kv_lora_rank=256),
    "dense": SyntheticSpec(hidden_size=128, intermediate_size=4096),
    "experts": SyntheticSpec(routed_expert_hidden_size=1024, moe_intermediate_size=1024, num_experts_per_token=8),
    "blocks": SyntheticSpec(num_hidden_layers=12, attn_res_block_size=1, hidden_size=1024),
    "vocabulary": SyntheticSpec(vocab_size=8192),
}


def frame(step: int, position: int, tokens: int) -> pa.Buffer:
    return encode_activations(
        ActivationFrame(
            step=step,
            sessions=np.zeros(tokens, np.int64),
            positions=np.arange(position, position + tokens),
            ids=np.arange(tokens, dtype=np.int32),
            wants_logits=np.arange(tokens) == tokens - 1,
            prefix=np.zeros((tokens, 0), np.float32),
            blocks=np.zeros((tokens, 0, 0), np.float32),
        )
    )


@pytest.fixture(params=WIDTHS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, ModelConfig]]:
    directory = tmp_path / "model"
    write_checkpoint(directory, replace(WIDTHS[request.param], num_experts=16), 0, lambda done, total: None)
    yield directory, read_config(directory)


@pytest.mark.parametrize("tokens", [64, 1])
def test_a_step_takes_no_more_than_was_planned(model: tuple[Path, ModelConfig], tokens: int) -> None:
    """numpy's arrays by tracemalloc, and three of the answers' buffers; the bound is not idle either."""
    directory, config = model
    layers, positions = config.num_hidden_layers, 400
    message = [frame(1, 0, 64), frame(2, 64, tokens)]
    for first, stop in ((0, layers // 2), (layers // 2, layers)):
        stage, _ = load_stage(StageSpec(CheckpointSpec(directory, None, layers), first, stop, 2, ()), [])
        stage.open_sequence(0, positions)
        answers = [stage.apply(message[0])]
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            answers.append(stage.apply(message[1]))
            taken = tracemalloc.get_traced_memory()[1] - before
        finally:
            tracemalloc.stop()
        planned = memory_parts.stage_working_bytes(config, range(first, stop), tokens, positions, 2)
        assert taken + 3 * answers[1].size <= planned + 50_000
        if tokens > 1:
            assert planned < 3.5 * (taken + 3 * answers[1].size) + 1_000_000
        message = answers


def test_the_state_is_counted_to_the_byte(k3b_dir: Path) -> None:
    config = read_config(k3b_dir)
    for first, stop, positions in ((0, 9, 1), (0, 4, 77), (4, 9, 1000)):
        state = new_sequence(config, range(first, stop), positions)
        arrays = [
            array
            for layer in state.layers.values()
            for array in (
                (layer.matrices, layer.tail_q, layer.tail_k, layer.tail_v)
                if isinstance(layer, KdaState)
                else (layer.cache,)
            )
        ]
        counted = memory_parts.state_bytes(config, range(first, stop), positions)
        assert counted == sum(array.nbytes for array in arrays)


def test_every_tensor_of_a_layer_is_trunk_or_small(k3b_dir: Path) -> None:
    config = read_config(k3b_dir)
    for layer in range(config.num_hidden_layers):
        on_tape = {tensor.short for tensor in tape_tensors(config) if tensor.layer == layer}
        small = {short: shape for short, (_, shape) in layer_tensors(config, layer).items() if short not in on_tape}
        elements = sum(int(np.prod(shape)) for shape in small.values())
        assert memory_parts.small_tensor_bytes(config, range(layer, layer + 1)) == 4 * elements
        assert not [short for short in small if short.endswith("_proj.weight") and "res_proj" not in short]
