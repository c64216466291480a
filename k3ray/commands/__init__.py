"""One file a command: options in, the Python API called, results printed."""
