"""The checkpoint on disk: config, shard headers, tensor index, tensor reads, and what must be refused."""
