"""The command line's entry."""


def main() -> None:
    """Run the k3ray command."""
