"""The audit's page: one HTML file that holds its data, its style and its script, and asks the network for nothing.

It does not know what an audit looks for: it shows a snapshot. The parts lie in the folder page/ beside this file.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

import msgspec

from k3ray.audit.plain_page import plain_page
from k3ray.audit.snapshot import Snapshot

# In the order in which they are joined: a later one uses what an earlier one declares.
STYLES = (
    "colours.css",
    "frame.css",
    "masthead.css",
    "evidence.css",
    "layers.css",
    "tensors.css",
    "parameters.css",
    "print.css",
)
SCRIPTS = (
    "elements.js",
    "figures.js",
    "evidence.js",
    "statements.js",
    "filters.js",
    "tabs.js",
    "read_first.js",
    "layer_map.js",
    "layer_details.js",
    "tensor_shares.js",
    "expert_anatomy.js",
    "kind_table.js",
    "a_log.js",
    "range_plots.js",
    "probe.js",
    "boundary.js",
    "start.js",
)

_PLACE = re.compile(r"\{\{([a-z_]+)\}\}")
# What could end the element that holds the data, or open a comment or another element inside it. The escapes
# are JSON's own, so the text that the page reads is the text that was written.
_UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
_UNSAFE_PATTERN = re.compile("[" + "".join(_UNSAFE) + "]")


def render(snapshot: Snapshot) -> str:
    """Return the page as one HTML document (UTF-8, to be written as it is).

    Every string of the snapshot is somebody else's: it stands inside the JSON of a data element, from where the script
    puts it on the page as text, and escaped in the tables for readers without scripts. A content security policy names
    the hashes of the one script and the one style, so that nothing else could run, and allows no address, so that
    nothing could be fetched.
    """
    style = _joined(STYLES)
    script = f'"use strict";\n(() => {{\n{_joined(SCRIPTS)}}})();\n'
    policy = (
        f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {"policy": policy, "style": style, "script": script, "data": embedded_json(snapshot)}
    parts["plain"] = plain_page(snapshot)
    # One pass over the template alone: a name in braces inside the data or the script is not a place.
    return _PLACE.sub(lambda place: parts[place[1]], _part("page.html"))


def embedded_json(snapshot: Snapshot) -> str:
    """Return the snapshot's JSON such that no text in it can end the script element around it."""
    return _UNSAFE_PATTERN.sub(lambda unsafe: _UNSAFE[unsafe[0]], msgspec.json.encode(snapshot).decode("utf-8"))


def _joined(names: tuple[str, ...]) -> str:
    """Return the parts one after another."""
    return "\n".join(_part(name) for name in names)


def _part(name: str) -> str:
    """Return one of the page's parts."""
    return (files("k3ray.audit") / "page" / name).read_text("utf-8")


def _digest(text: str) -> str:
    """Return the source expression of a content security policy for exactly this text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}'"
