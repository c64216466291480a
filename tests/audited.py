"""What the tests of an audit over HTTP share: a checkpoint in which little is much, and its audit as users get it."""

from __future__ import annotations

from contextlib import closing

from k3ray.audit.http_files import HttpFiles
from k3ray.audit.making import AuditOptions, make_audit
from k3ray.audit.snapshot import Snapshot
from k3ray.workers.checkpoint.synthetic_spec import SyntheticSpec

# Wide matrices and few tensors, so that headers and small tensors are under one per cent, as in the release.
WIDE = SyntheticSpec(
    num_hidden_layers=6, hidden_size=1024, intermediate_size=6144, num_experts=8, num_experts_per_token=2,
    routed_expert_hidden_size=256, moe_intermediate_size=512, q_lora_rank=256, attn_res_block_size=3,
)  # fmt: skip
SHARD = "model-00003-of-000007.safetensors"
ANY_SHARD = r"\.safetensors$"


def fetched(address: str, token: str | None = None, hub: str = "https://huggingface.co") -> Snapshot:
    """The audit of what is at an address, with no waiting between attempts."""
    with closing(HttpFiles(address, token, hub, waits_s=(0.0, 0.0))) as files:
        return make_audit(files, AuditOptions(threads=0))
