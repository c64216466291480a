"""What each part of a run takes of memory: arithmetic on the config, and the few sizes that had to be measured.

Knows neither budgets nor wishes. Docs: docs/memory.md has the measurements and what each part is.
"""

from __future__ import annotations

from math import prod

from k3ray.kernels import mla, mla_tiles
from k3ray.workers.checkpoint import shapes
from k3ray.workers.model.config import ModelConfig
from k3ray.workers.tape.order import tape_tensors

# Measured with Ray 2.60, numpy 2.4, numba 0.68, pyarrow 26 (docs/memory.md), rounded up. PSS counts a page of a library
# once over all processes, so the libraries are one part and a process is what it has written itself.
LIBRARY_BYTES = 265_000_000  # measured 187 to 262: what the page cache holds of a file is mapped with it
RAY_BYTES = 45_000_000  # gcs_server, raylet and their idle agents: 34
DRIVER_BYTES = 105_000_000  # 95
VOCABULARY_BYTES = 420  # a token of the vocabulary in the driver: 67 MB for 163,840
ACTOR_BYTES = 135_000_000  # interpreter, Ray's client and the compiled kernels: 116 to 125
INDEX_BYTES = 24  # a tensor, mapped by all processes together
ALLOCATOR = 1.25  # what the C library keeps of freed arrays, on top of the arrays in use


def trunk_bytes(config: ModelConfig, layers: range, head: bool) -> int:
    """The matrices of the layers, and with `head` the head: what is on the tape, without its padding."""
    wanted = {*layers, *([config.num_hidden_layers] if head else [])}
    return sum(tensor.nbytes for tensor in tape_tensors(config) if tensor.layer in wanted)


def small_tensor_bytes(config: ModelConfig, layers: range) -> int:
    """Norms, AttnRes projections, convolutions and biases of the layers, as float32: not on the tape, all resident."""
    on_tape = {(tensor.layer, tensor.short) for tensor in tape_tensors(config)}
    return 4 * sum(
        prod(shape)
        for layer in layers
        for short, (_, shape) in shapes.layer_tensors(config, layer).items()
        if (layer, short) not in on_tape
    )


def expert_bytes(config: ModelConfig) -> int:
    """Bytes of one routed expert: what is read for it."""
    return sum(map(shapes.nbytes, shapes.expert_tensors(config).values()))


def shared_bytes(config: ModelConfig) -> int:
    """The matrices of one layer's shared experts, which are on the tape."""
    if not config.num_shared_experts or not config.moe_layers:
        return 0
    layer = config.moe_layers[0]
    return sum(one.nbytes for one in tape_tensors(config) if one.layer == layer and "shared_experts" in one.short)


def state_bytes(config: ModelConfig, layers: range, positions: int) -> int:
    """What the layers remember of one sequence of `positions`: KDA matrices and tails, MLA latents (state.py)."""
    tails = 3 * (config.conv_kernel_size - 1) * config.kda_width
    kda = 4 * (config.kda_width * config.kda_head_dim + tails)
    return sum(position_bytes(config) * positions if config.is_mla(layer) else kda for layer in layers)


def position_bytes(config: ModelConfig) -> int:
    """Bytes that one MLA layer keeps of one position."""
    return 4 * (config.kv_lora_rank + config.qk_rope_head_dim)


def index_bytes(config: ModelConfig) -> int:
    """The index of the text model's tensors."""
    experts = len(config.moe_layers) * config.num_experts * len(shapes.expert_tensors(config))
    layers = sum(len(shapes.layer_tensors(config, layer)) for layer in range(config.num_hidden_layers))
    return INDEX_BYTES * (experts + layers + len(shapes.top_tensors(config)))


def frame_bytes(config: ModelConfig, layer: int, tokens: int) -> int:
    """A step's activations before a layer: the running sum and the finished blocks of AttnRes."""
    finished = -(-layer // config.attn_res_block_size)
    return 4 * tokens * config.hidden_size * (1 + finished)


def message_bytes(config: ModelConfig, cuts: tuple[int, ...], tokens: int, remote_experts: bool) -> int:
    """Messages under way between the processes: a frame between each two stages and one more, requests and replies."""
    frames = 2 * sum(frame_bytes(config, cut, tokens) for cut in cuts[1:-1])
    logits = 4 * config.vocab_size * len(cuts)
    pairs = tokens * (1 + config.num_experts_per_token) * config.routed_expert_hidden_size
    return frames + logits + (4 * pairs * (len(cuts) - 1) if remote_experts else 0)


def stage_working_bytes(config: ModelConfig, layers: range, tokens: int, positions: int, threads: int) -> int:
    """The largest that the arrays of one step of `tokens` tokens of a sequence of `positions` are at any time."""
    largest = 0
    for layer in layers:
        attention = _mla(config, tokens, positions, threads) if config.is_mla(layer) else _kda(config, tokens)
        feed_forward = _moe(config, tokens) if config.is_moe(layer) else _mlp(config, config.intermediate_size, tokens)
        streams = 2 * frame_bytes(config, layer + 1, tokens) + 16 * tokens * config.hidden_size
        largest = max(largest, streams + max(attention, feed_forward))
    answer = 3 * frame_bytes(config, layers.stop, tokens)  # being written, written, and the one kept from before
    if layers.stop == config.num_hidden_layers:
        answer = 16 * config.vocab_size
        largest = max(largest, answer + _packed(1, config.hidden_size))
    return int(ALLOCATOR * (largest + answer))


def shard_working_bytes(config: ModelConfig, tokens: int) -> int:
    """The arrays of a shard while it answers for one step of `tokens` tokens."""
    return int(ALLOCATOR * (_routed(config, tokens) + 4 * tokens * config.num_experts_per_token * _latent(config)))


def _kda(config: ModelConfig, tokens: int) -> int:
    """Projections q, k, v, their convolutions, decay and its logits, output and its copy: ten at once."""
    small = config.kda_num_heads + config.kda_head_dim
    return 4 * tokens * (10 * config.kda_width + small) + _packed(tokens, max(config.hidden_size, config.kda_width))


def _mla(config: ModelConfig, tokens: int, positions: int, threads: int) -> int:
    heads, latent = config.num_attention_heads, config.kv_lora_rank + config.qk_rope_head_dim
    queries, values = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim), heads * config.v_head_dim
    arrays = 4 * tokens * (queries + 3 * values + 2 * latent + 2 * config.q_lora_rank)
    folded = heads * min(tokens, mla.TOKENS) * (8 * latent + 4 * config.kv_lora_rank)
    scores = 8 * threads * mla.QUERIES * (positions + latent + 2 * mla_tiles.POSITIONS)
    return arrays + folded + scores + _packed(tokens, max(config.hidden_size, config.q_lora_rank, values))


def _moe(config: ModelConfig, tokens: int) -> int:
    """Router, latents, what comes back of the routed experts, and the shared ones, which run meanwhile."""
    own = 4 * tokens * (config.num_experts + 3 * _latent(config) + 2 * config.hidden_size)
    pairs = 4 * tokens * config.num_experts_per_token * _latent(config)
    shared = _mlp(config, config.shared_intermediate_size, tokens) if config.num_shared_experts else 0
    return own + 2 * pairs + max(shared, _routed(config, tokens) + 4 * tokens * config.hidden_size)


def _routed(config: ModelConfig, tokens: int) -> int:
    """One routed expert on all tokens: gate, up and inner, inputs as integers, and the outputs."""
    return tokens * (12 * config.moe_intermediate_size + 8 * (_latent(config) + config.moe_intermediate_size)) + (
        8 * tokens * _latent(config)
    )


def _mlp(config: ModelConfig, inner: int, tokens: int) -> int:
    return 4 * tokens * (3 * inner + config.hidden_size) + _packed(tokens, max(config.hidden_size, inner))


def _packed(tokens: int, columns: int) -> int:
    """The input of a dense matrix as doubles (kernels/dense.py)."""
    return 8 * (tokens + 8) * columns


def _latent(config: ModelConfig) -> int:
    return config.routed_expert_hidden_size
