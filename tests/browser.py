"""A real browser: Debian's Chromium without a window, driven through its DevTools protocol over a pair of pipes."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from importlib.resources import files

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-extensions", "--disable-sync"),
]
PATIENCE = 20  # seconds that an answer may take, on a machine that is busy with other tests
KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, "Home": 36, "End": 35, " ": 32}
KEYS |= {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


class Browser:
    """A running Chromium. Messages are JSON, each ended by a zero byte."""

    def __init__(self, folder):
        (read, self._out), (self._in, write) = os.pipe(), os.pipe()
        wires = f"exec 3<&{read} 4>&{write}; exec {CHROMIUM} {' '.join(FLAGS)} --remote-debugging-pipe"
        self._running = subprocess.Popen(
            ["bash", "-c", f'{wires} --user-data-dir="$0" about:blank', str(folder)],
            pass_fds=(read, write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read)
        os.close(write)
        self._rest, self._number = b"", 0

    def ask(self, method, session=None, events=None, **parameters):
        """Send a command and return its result; what happens meanwhile is added to `events`."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        os.write(self._out, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        while True:
            heard = self.hear()
            if heard.get("id") == self._number:
                assert "error" not in heard, f"{method}: {heard}"
                return heard["result"]
            if events is not None and "method" in heard:
                events.append(heard)

    def hear(self):
        """Return the next message."""
        until = time.monotonic() + PATIENCE
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0, until - time.monotonic()))
            assert ready, f"Chromium has said nothing for {PATIENCE} seconds"
            found = os.read(self._in, 1 << 16)
            assert found, "Chromium has ended"
            self._rest += found
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def close(self):
        self._running.terminate()
        self._running.wait(PATIENCE)
        os.close(self._out)
        os.close(self._in)


class Tab:
    """One page in it, and all that it asked for and complained of."""

    def __init__(self, browser):
        self._browser, self.events = browser, []
        self._target = browser.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = browser.ask("Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method, **parameters):
        return self._browser.ask(method, self._session, self.events, **parameters)

    def open(self, address, width=1200, height=900, dark=False):
        """Show a file, or the page of an address, in a window of this size; wait until it is loaded."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.dark(dark)
        self.events.clear()
        self.ask("Page.navigate", url=address if isinstance(address, str) else address.as_uri())
        while not self.told("Page.loadEventFired"):
            self.events.append(self._browser.hear())
        return self

    def dark(self, dark):
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[feature])

    def run(self, expression):
        """Return what an expression is in the page."""
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def settle(self):
        """Wait until what follows from the last event is drawn."""
        frames = "requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 50)))"
        self.run(f"new Promise((done) => {frames})")

    def until(self, expression):
        """Wait until an expression is true in the page."""
        given_up = time.monotonic() + PATIENCE
        while not self.run(expression):
            assert time.monotonic() < given_up, f"still not: {expression}"
            self.settle()

    def press(self, *keys):
        for key in keys:
            typed = {"Enter": "\r", " ": " "}.get(key, "")
            for kind in ("keyDown", "keyUp"):
                self.ask(
                    "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=KEYS[key], code=key, text=typed
                )

    def point(self, x, y, click=False):
        for kind in ["mouseMoved", *(["mousePressed", "mouseReleased"] if click else [])]:
            button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)

    def violations(self, *rules):
        """Return what axe-core finds serious or critical about the page's accessibility, each with its elements.

        Of some rules alone, or of all.
        """
        if not self.run("'axe' in window"):
            self.run(files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8") + "; 0")
        options = {"resultTypes": ["violations"], **({"runOnly": list(rules)} if rules else {})}
        found = self.run(f"axe.run({json.dumps(options)}).then((result) => result.violations)")
        grave = [rule for rule in found if rule["impact"] in ("serious", "critical")]
        return [f"{rule['id']}: {', '.join(str(node['target'][0]) for node in rule['nodes'])}" for rule in grave]

    def picture(self):
        """Return a PNG of the window."""
        return base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"])

    def told(self, method):
        return [event["params"] for event in self.events if event.get("method") == method]

    @property
    def asked_for(self):
        """Every address that was fetched, or was to be."""
        return [event["request"]["url"] for event in self.told("Network.requestWillBeSent")]

    @property
    def complaints(self):
        """Errors, warnings, and what the policy refused."""
        self.settle()
        logged = [f"{one['entry']['level']}: {one['entry']['text']}" for one in self.told("Log.entryAdded")]
        thrown = [one["exceptionDetails"]["text"] for one in self.told("Runtime.exceptionThrown")]
        return logged + thrown + [str(one["args"]) for one in self.told("Runtime.consoleAPICalled")]

    def close(self):
        self._browser.ask("Target.closeTarget", targetId=self._target)
