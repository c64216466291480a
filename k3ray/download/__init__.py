"""Getting a checkpoint and proving it: every byte fetched once, every file checked against what was published."""
