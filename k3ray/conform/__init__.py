"""The formulas against a PyTorch reference: every layer, and whole prompts, on both sides, and what differs."""
