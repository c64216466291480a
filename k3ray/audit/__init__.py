"""The audit of a checkpoint: what was observed, derived and executed, each kept apart, and the page that shows it."""
