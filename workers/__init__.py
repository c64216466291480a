"""One process: the checkpoint's bytes, the model's layers and state, the experts, the messages between processes."""
