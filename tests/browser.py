"""A headless Chromium for tests of pages: its sizes and themes, what it logs, what it asks the network for."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = "/usr/bin/chromium"
DRIVER = "/usr/bin/chromedriver"
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)

# Every text on the page with less contrast to its ground than WCAG AA asks: [[text, ratio, colour, ground], ...].
_LOW_CONTRAST = """
const channels = (colour) => {
  const numbers = colour.match(/[\\d.]+/g).map(Number);
  if (!/^rgba?\\(/.test(colour)) throw new Error("not an rgb colour: " + colour);
  return numbers.length > 3 ? numbers : [...numbers, 1];
};
const light = ([r, g, b]) => {
  const [x, y, z] = [r, g, b].map((v) => ((v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
  return 0.2126 * x + 0.7152 * y + 0.0722 * z;
};
const over = (top, under) => [0, 1, 2].map((i) => top[i] * top[3] + under[i] * (1 - top[3]));
const grounds = new Map();
const ground = (node) => {
  if (!node) return [255, 255, 255];
  if (!grounds.has(node)) {
    const own = channels(getComputedStyle(node).backgroundColor);
    grounds.set(node, own[3] === 1 ? own : over(own, ground(node.parentElement)));
  }
  return grounds.get(node);
};
const low = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const node = walker.currentNode.parentElement;
  if (!walker.currentNode.data.trim() || !node.checkVisibility() || node.closest("script, style, .unseen")) continue;
  const style = getComputedStyle(node);
  const under = ground(node);
  const [a, b] = [light(over(channels(style.color), under)), light(under)].sort((x, y) => y - x);
  const size = parseFloat(style.fontSize);
  const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
  const ratio = (a + 0.05) / (b + 0.05);
  if (ratio < (large ? 3 : 4.5)) low.push([walker.currentNode.data, ratio, style.color, under.join()]);
}
return low;
"""


class Browser:
    """One Chromium with a fresh profile. Knows nothing of the page that it shows."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, address: str) -> None:
        """Load an address anew, also when only its fragment differs from the last."""
        self.driver.get("about:blank")
        self.driver.get(address)

    def resize(self, width: int, height: int = 900) -> None:
        """Set the page's size in CSS pixels; below 600 as a phone does, with the page's own viewport rule."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def prefer(self, theme: str, media: str = "") -> None:
        """Set prefers-color-scheme, and the medium when it is not the screen."""
        features = [
            {"name": "prefers-color-scheme", "value": theme},
            {"name": "prefers-reduced-motion", "value": "reduce"},  # so that colours are measured when they are there
        ]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features, "media": media})

    def run(self, script: str, *arguments: Any) -> Any:
        """Run the body of a JavaScript function and return its value."""
        return self.driver.execute_script(script, *arguments)

    def texts(self, selector: str) -> list[str]:
        """Return the text that each element shows, as a reader sees it; hidden ones give an empty string."""
        found = self.run("return [...document.querySelectorAll(arguments[0])].map((e) => e.innerText)", selector)
        return list(found)

    def shown(self, selector: str) -> int:
        """Return how many of the elements are visible."""
        count = "return [...document.querySelectorAll(arguments[0])].filter((e) => e.checkVisibility()).length"
        return int(self.run(count, selector))

    def press(self, *keys: str) -> None:
        """Press keys, one after another, wherever the focus is."""
        from selenium.webdriver.common.action_chains import ActionChains

        chain = ActionChains(self.driver)
        for key in keys:
            chain.send_keys(key)
        chain.perform()

    def overflow(self) -> int:
        """Return by how many pixels the document is wider than its window."""
        return int(self.run("return document.documentElement.scrollWidth - document.documentElement.clientWidth"))

    def low_contrast(self) -> list[list[Any]]:
        """Return the visible texts that miss WCAG AA: text, ratio, colour, ground."""
        return list(self.run(_LOW_CONTRAST))

    def screenshot(self, path: Path) -> None:
        """Write the whole page, not only the window, as PNG."""
        size = self.run("return [document.documentElement.clientWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": size[0], "height": min(size[1], 12_000), "scale": 1}
        parameters = {"captureBeyondViewport": True, "clip": clip}
        answer = self.driver.execute_cdp_cmd("Page.captureScreenshot", parameters)
        path.write_bytes(base64.b64decode(answer["data"]))

    def print_pdf(self) -> bytes:
        """Return the page as it would be printed."""
        answer = self.driver.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})
        return base64.b64decode(answer["data"])

    def console(self) -> list[str]:
        """Return, and forget, what the console and uncaught errors said."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Return, and forget, the address of every request that a page has made."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        wanted = ("Network.requestWillBeSent", "Network.webSocketCreated", "Network.webTransportCreated")
        found = [message["params"] for message in messages if message["method"] in wanted]
        return [params["request"]["url"] if "request" in params else params["url"] for params in found]


@contextmanager
def headless_browser(profile: Path) -> Iterator[Browser]:
    """Start Chromium; skip the test, with the reason, where it or selenium is absent."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is absent: no browser can be driven")
    for program in (CHROMIUM, DRIVER):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is absent: no browser can be driven")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
