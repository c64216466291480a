"""Which hub a command talks to: the command line's, the environment's, or the default."""

from __future__ import annotations

from k3ray.download.hub import DEFAULT_ENDPOINT, Hub, check_endpoint
from k3ray.environment import Environment


def choose_hub(endpoint: str | None, environment: Environment) -> Hub:
    """The endpoint of --endpoint, of HF_ENDPOINT or the default, with the token of HF_TOKEN."""
    if endpoint is not None:
        return Hub(check_endpoint(endpoint, "--endpoint"), "named by --endpoint", environment.hf_token)
    if environment.hf_endpoint is not None:
        chosen = check_endpoint(environment.hf_endpoint, "HF_ENDPOINT")
        return Hub(chosen, "named by HF_ENDPOINT", environment.hf_token)
    return Hub(DEFAULT_ENDPOINT, "the default", environment.hf_token)
