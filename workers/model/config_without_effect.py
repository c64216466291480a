"""Fields of the released config.json that change nothing here, with the reason: every other unread field is said.

The test that the released file has no others keeps this list closed.
"""

from __future__ import annotations

# Names and bookkeeping of the library that wrote the file.
_BOOKKEEPING = (
    "_name_or_path", "architectures", "auto_map", "finetuning_task", "id2label", "initializer_range", "label2id",
    "problem_type", "task_specific_params", "tokenizer_class", "transformers_version",
)  # fmt: skip
# How a weight is stored: binding proves every dtype. Positions never enter the arithmetic. One group of experts is all.
_PROVEN_ELSEWHERE = ("dtype", "torch_dtype", "use_bfloat16", "max_position_embeddings", "use_grouped_topk")
# Ids of the tokenizer's and the vision model's, and the vision model itself, which is left alone.
_OTHER_PARTS = (
    "bos_token_id", "decoder_start_token_id", "ignore_index", "image_placeholder", "media_placeholder_token_id",
    "pad_token_id", "sep_token_id", "vision_config",
)  # fmt: skip
# What that library's own classes do around a model: its outputs' form, training, encoders.
_LIBRARY = (
    "add_cross_attention", "chunk_size_feed_forward", "cross_attention_hidden_size", "is_decoder",
    "is_encoder_decoder", "output_attentions", "output_hidden_states", "output_scores", "remove_invalid_values",
    "return_dict", "return_dict_in_generate", "tf_legacy_loss", "tie_encoder_decoder", "torchscript", "use_cache",
)  # fmt: skip
# Defaults of that library's sampling: here the likeliest id is taken.
_SAMPLING = (
    "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping",
    "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id",
    "length_penalty", "max_length", "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
    "num_return_sequences", "prefix", "repetition_penalty", "suppress_tokens", "temperature", "top_k", "top_p",
    "typical_p",
)  # fmt: skip

WITHOUT_EFFECT = frozenset((*_BOOKKEEPING, *_PROVEN_ELSEWHERE, *_OTHER_PARTS, *_LIBRARY, *_SAMPLING))
