"""Headless Chromium through chromedriver, spoken to over WebDriver's HTTP with the standard library alone.

A session has a browser of its own with an empty profile, and ends with it. Everything goes to loopback.
"""

import base64
import json
import re
import subprocess
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars",
]  # fmt: skip
TIMEOUT_S = 60


class Browser:
    """One browser with one page; a context manager."""

    def __init__(self, chromedriver="chromedriver", chromium="/usr/bin/chromium"):
        self.profile = tempfile.TemporaryDirectory(prefix="ringfetch-page-")
        self.log_path = Path(self.profile.name) / "chromedriver.log"
        self.driver = subprocess.Popen(
            [chromedriver, "--port=0", f"--log-path={self.log_path}"],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.session = None
        try:
            self.base = f"http://127.0.0.1:{self._port()}"
            options = {"binary": chromium, "args": [*FLAGS, f"--user-data-dir={self.profile.name}/profile"]}
            wanted = {
                "browserName": "chrome",
                "goog:chromeOptions": options,
                "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
            }
            answer = self._send("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
            self.session = answer["sessionId"]
            self.version = answer["capabilities"]["browserVersion"]
        except BaseException:
            self.close()
            raise

    def _port(self):
        for line in self.driver.stdout:
            found = re.search(r"started successfully on port (\d+)", line)
            if found:
                return int(found.group(1))
        raise RuntimeError(f"chromedriver did not start: {self.log_path.read_text()}")

    def _send(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            value = json.load(error)["value"]
            raise RuntimeError(f"{method} {path}: {value['error']}: {value['message']}") from None

    def command(self, method, path, body=None):
        """A WebDriver command of this session."""
        return self._send(method, f"/session/{self.session}{path}", body)

    def cdp(self, name, **parameters):
        """A command of the DevTools protocol."""
        return self.command("POST", "/goog/cdp/execute", {"cmd": name, "params": parameters})

    def open(self, url):
        """Loads a page, to its load event."""
        self.command("POST", "/url", {"url": url})

    def run(self, script, *arguments):
        """What a function body answers, run in the page."""
        return self.command("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def text(self, selector):
        """The text of an element."""
        return self.run("return document.querySelector(arguments[0]).textContent", selector)

    def size(self, width, height):
        """The viewport, in CSS pixels."""
        self.cdp(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def prefer(self, **features):
        """Media features, such as prefers_color_scheme='dark'."""
        listed = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.cdp("Emulation.setEmulatedMedia", features=listed)

    def key(self, key):
        """One key, pressed and released."""
        codes = {"Tab": 9, "Enter": 13}
        event = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        text = {"text": "\r"} if key == "Enter" else {}
        self.cdp("Input.dispatchKeyEvent", type="keyDown", **event, **text)
        self.cdp("Input.dispatchKeyEvent", type="keyUp", **event)

    def log(self, kind):
        """What was logged since the last call: `browser` (the console) or `performance` (events of the network)."""
        return self.command("POST", "/se/log", {"type": kind})

    def screenshot(self, path, whole=True):
        """Writes a PNG of the page."""
        answer = self.cdp("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        Path(path).write_bytes(base64.b64decode(answer["data"]))

    def close(self):
        """Ends the browser, then its driver."""
        try:
            if self.session:
                self._send("DELETE", f"/session/{self.session}")
        finally:
            self.driver.terminate()
            self.driver.wait(timeout=TIMEOUT_S)
            self.driver.stdout.close()
            self.profile.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
