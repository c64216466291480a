"""Kimi K3, exactly, on CPUs: commands, Python API, tokenizer, driver and reports."""
