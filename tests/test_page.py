"""The page at /, in a real browser, against a server that streams what a test tells it to.

Set FLASHSTEP_SCREENSHOTS to a directory to keep pictures of it.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[1] / "flashstep" / "server" / "page.html"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
KEY = "sesame"

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (Debian: apt-get install chromium)")

# One entry per step: texts of its tokens, drafts that stood, drafts. The first comes with the prompt; one token holds
# back half a character.
STEPS: list[tuple[list[str], int, int]] = [
    (["    "], 0, 0),
    (["if", " shape", ".", "kind", " ==", " '"], 5, 5),
    (["circle"], 0, 5),
    (["':", "\n", "       "], 2, 5),
    ([" return", " ", "", "π", " *"], 4, 5),
    ([" shape", ".r"], 1, 5),
    ([" **", " 2", "\n", "    ", "return", " 0"], 5, 5),
    (["\n"], 0, 4),
]
TEXT = "".join("".join(texts) for texts, _, _ in STEPS)


# -- a server that says what it is told to ----------------------------------------------------------------------------


class Fake(BaseHTTPRequestHandler):
    """Answers by what the prompt says."""

    protocol_version = "HTTP/1.1"
    seen: list[tuple[str, dict[str, Any]]]
    gone: threading.Event

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/":
            self.answer(200, PAGE.read_bytes(), "text/html; charset=utf-8")
        elif self.path == "/v1/models":
            self.answer(200, json.dumps({"object": "list", "data": [{"id": "tiny"}]}).encode())
        else:
            self.answer(404, b"{}")

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append((self.path, asked))
        chat = self.path == "/v1/chat/completions"
        prompt = asked["messages"][0]["content"] if chat else asked["prompt"]
        if prompt == "key" and self.headers["Authorization"] != f"Bearer {KEY}":
            return self.refuse(401, "Incorrect API key provided")
        if prompt == "full":
            return self.refuse(429, "1024 requests are waiting", headers={"Retry-After": "7"})
        if prompt == "unhealthy":
            return self.refuse(503, "the engine stopped: out of memory")
        if prompt == "wrong":
            return self.refuse(400, "found 9000, wanted at most 4096", param="max_tokens")
        if prompt == "proxy":
            return self.answer(502, b"<html>Bad gateway</html>", "text/html")
        return self.stream(prompt, chat)

    def stream(self, prompt: str, chat: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        steps = [(["<img src=x ", "onerror=alert(1)>"], 1, 5)] if prompt == "markup" else STEPS
        if prompt in ("forever", "long"):
            steps = STEPS * 40
        for number, (texts, accepted, drafted) in enumerate(steps):
            if prompt == "cut" and number == 3:
                return
            if prompt == "breaks" and number == 3:
                self.event({"error": {"message": "the step failed: page 3 is broken", "code": "engine"}})
                return
            text = "".join(texts)
            where = "reasoning_content" if number < 2 else "content"
            choice: dict[str, Any] = {"index": 0, "finish_reason": None} | (
                {"delta": {where: text}} if chat else {"text": text}
            )
            ids = [100 * number + i for i in range(len(texts))]
            choice["dspark"] = {"tokens": ids, "texts": texts, "accepted": accepted, "drafted": drafted}
            if number == len(steps) - 1:
                choice["finish_reason"] = "stop"
            if not self.event({"choices": [choice], "usage": None}):
                return
            time.sleep(0.05 if prompt == "forever" else 0.004 + 0.002 * (number % 3))
        usage = {"prompt_tokens": 11, "completion_tokens": sum(len(t) for t, _, _ in steps)}
        self.event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, event: dict[str, Any]) -> bool:
        """In two pieces that part a character where there is one."""
        data = f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode()
        cut = next((i + 1 for i, byte in enumerate(data) if byte > 127), len(data) // 2)
        try:
            for part in (data[:cut], data[cut:]):
                self.wfile.write(part)
                self.wfile.flush()
                time.sleep(0.001)
        except OSError:
            self.gone.set()
            return False
        return True

    def refuse(
        self, status: int, message: str, *, param: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        error = {"error": {"message": message, "type": "x", "param": param, "code": None}}
        self.answer(status, json.dumps(error).encode(), headers=headers)

    def answer(
        self, status: int, body: bytes, kind: str = "application/json", headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        if self.path == "/":
            policy = "default-src 'self' 'unsafe-inline'; img-src 'self' data:; base-uri 'none'; form-action 'none'"
            self.send_header("Content-Security-Policy", policy)
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture(scope="module")
def fake() -> Iterator[ThreadingHTTPServer]:
    Fake.seen, Fake.gone = [], threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Fake)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


# -- a browser --------------------------------------------------------------------------------------------------------


class Browser:
    """One tab, driven over the DevTools protocol."""

    def __init__(self, socket: Any) -> None:
        self._socket, self._last = socket, 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._last += 1
        self._socket.send(json.dumps({"id": self._last, "method": method, "params": params}))
        while (message := json.loads(self._socket.recv())).get("id") != self._last:
            self.events.append(message)
        assert "error" not in message, (method, message["error"])
        return message["result"]

    def js(self, expression: str) -> Any:
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def until(self, expression: str, timeout_s: float = 20.0) -> None:
        end = time.monotonic() + timeout_s
        while not self.js(expression):
            assert time.monotonic() < end, f"never came true: {expression}; the page shows {self.text('main')!r}"
            time.sleep(0.02)

    def text(self, selector: str) -> str:
        return self.js(f"document.querySelector({json.dumps(selector)}).textContent")

    def count(self, selector: str) -> int:
        return self.js(f"document.querySelectorAll({json.dumps(selector)}).length")

    def visible(self, selector: str) -> bool:
        return self.js(f"document.querySelector({json.dumps(selector)}).checkVisibility()")

    def fill(self, name: str, value: str) -> None:
        self.js(f"document.getElementById({json.dumps(name)}).value = {json.dumps(value)}")

    def click(self, selector: str) -> None:
        """A press of the mouse in the middle of what is there, whatever covers it."""
        self.js(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})")
        box = self.js(
            f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])"
            f"(document.querySelector({json.dumps(selector)}).getBoundingClientRect())"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def press(self, key: str, *, control: bool = False) -> None:
        code = {"Enter": 13}[key]
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, text="" if control else "\r",
                windowsVirtualKeyCode=code, modifiers=2 if control else 0,
            )  # fmt: skip

    def ask(self, prompt: str) -> None:
        self.fill("prompt", prompt)
        self.click("#generate")

    def finished(self) -> None:
        self.until("document.getElementById('stop').disabled")

    def size(self, width: int, height: int, *, phone: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)

    def scheme(self, name: str) -> None:
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def picture(self, name: str) -> None:
        if directory := os.environ.get("FLASHSTEP_SCREENSHOTS"):
            data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
            (Path(directory) / f"{name}.png").write_bytes(base64.b64decode(data))


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    websocket = pytest.importorskip("websocket")
    profile: Path = tmp_path_factory.mktemp("chromium")
    switches = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync --disable-dev-shm-usage --remote-debugging-port=0 "
        "--remote-allow-origins=*"
    )
    assert CHROMIUM is not None
    with (profile / "log").open("wb") as log:
        process = subprocess.Popen(
            [CHROMIUM, *switches.split(), f"--user-data-dir={profile}", "about:blank"], stdout=log, stderr=log
        )
    try:
        ready, end = profile / "DevToolsActivePort", time.monotonic() + 60
        while not ready.exists() or len(ready.read_text().splitlines()) < 2:
            assert process.poll() is None, (profile / "log").read_text(errors="replace")[-2000:]
            assert time.monotonic() < end, "chromium does not come up"
            time.sleep(0.05)
        port, path = ready.read_text().splitlines()
        socket = websocket.create_connection(f"ws://127.0.0.1:{port}{path}", timeout=60)
        browser = Browser(socket)
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        socket.close()
        socket = websocket.create_connection(f"ws://127.0.0.1:{port}/devtools/page/{target}", timeout=60)
        browser = Browser(socket)
        for domain in ("Page", "Runtime", "Network", "Log"):
            browser.call(f"{domain}.enable")
        yield browser
        socket.close()
    finally:
        process.terminate()
        process.wait(timeout=20)


@pytest.fixture
def page(tab: Browser, fake: ThreadingHTTPServer) -> Iterator[Browser]:
    """The page, freshly loaded; afterwards nothing may have gone wrong in it, nor anything been fetched elsewhere."""
    tab.events.clear()
    Fake.seen.clear()
    Fake.gone.clear()
    tab.size(1200, 1000)
    tab.scheme("light")
    origin = f"http://127.0.0.1:{fake.server_port}"
    tab.call("Page.navigate", url=origin + "/")
    tab.until("document.readyState === 'complete' && document.getElementById('model').textContent === 'tiny'")
    yield tab
    tab.js("run?.controller.abort()")
    thrown = [event["params"] for event in tab.events if event["method"] == "Runtime.exceptionThrown"]
    assert thrown == []
    urls = [e["params"]["request"]["url"] for e in tab.events if e["method"] == "Network.requestWillBeSent"]
    assert urls
    assert [url for url in urls if not url.startswith((origin, "data:"))] == []


# -- tests ------------------------------------------------------------------------------------------------------------


def test_tokens_are_coloured_by_step_and_drafts_told_from_own_tokens(page):
    page.ask("def area(shape):")
    page.finished()
    assert page.text("#output") == TEXT
    spans = page.js("[...document.querySelectorAll('#output .t')].map((t) => [t.className, t.textContent, t.title])")
    expected = []
    for number, (texts, accepted, _) in enumerate(STEPS):
        for i, text in enumerate(texts):
            own, line = " own" if i >= accepted else "", " line" if text == "\n" else ""
            expected.append((f"t c{number % 6}{own}{line}", text))
    assert [(name, text) for name, text, _ in spans] == expected
    assert [title for _, _, title in spans][:3] == [
        "step 1, token 0: the verifier's own",
        "step 2, token 100: draft 1 of 5",
        "step 2, token 101: draft 2 of 5",
    ]
    looks = page.js(
        """[...document.querySelectorAll('#output .t')].map((t) => {
             const s = getComputedStyle(t); return [s.backgroundColor, s.borderBottomWidth]; })"""
    )
    assert len({colour for colour, _ in looks}) == 6
    assert [(line != "0px") for _, line in looks] == ["own" in name for name, _ in expected]
    assert page.text("#status") == "ended by itself"
    page.picture("wide-light")
    page.scheme("dark")
    page.picture("wide-dark")


def test_figures_and_charts_show_the_stream(page):
    page.ask("def area(shape):")
    page.finished()
    tokens = sum(len(texts) for texts, _, _ in STEPS)
    later = len(STEPS) - 1
    assert page.text("#tokens") == f"{tokens} + 11 prompt"
    assert page.text("#tokens-per-step").strip() == f"{(tokens - 1) / later:.2f}"
    assert page.text("#accepted") == "50 % of 34"
    assert re.fullmatch(r"\d+ ms", page.text("#ttft"))
    assert float(page.text("#tokens-per-s")) > 0
    assert re.fullmatch(r"\d+\.\d ms median", page.text("#step-time"))
    assert page.count("#times .bar") == later
    heights = page.js("[...document.querySelectorAll('#lengths .bar')].map((b) => Number(b.getAttribute('height')))")
    counts = [sum(1 for _, a, d in STEPS if d and a == n) for n in range(6)]
    assert counts == [2, 1, 1, 0, 1, 2]
    assert [round(2 * h / max(heights)) for h in heights] == counts
    assert page.js("document.getElementById('lengths').getAttribute('aria-label')") == (
        "Steps by accepted drafts: 0: 2, 1: 1, 2: 1, 3: 0, 4: 1, 5: 2"
    )
    places = [(sum(1 for _, a, d in STEPS if i < min(a, d)), sum(1 for _, _, d in STEPS if i < d)) for i in range(5)]
    assert page.js("document.getElementById('places').getAttribute('aria-label')") == (
        "Acceptance by place in the block: "
        + ", ".join(f"{i + 1}: {int(100 * a / d + 0.5)}%" for i, (a, d) in enumerate(places))
    )
    assert page.js("document.getElementById('times').getAttribute('aria-label')").startswith(
        "Time between steps: median "
    )


def test_what_is_asked_of_the_server(page):
    page.fill("max-tokens", "64")
    page.fill("temperature", "0.7")
    page.fill("seed", "5")
    page.ask("Once")
    page.finished()
    page.fill("seed", "")
    page.click("label:has(input[value=chat])")
    page.ask("Hello")
    page.finished()
    common = {
        "model": "tiny",
        "max_tokens": 64,
        "temperature": 0.7,
        "stream": True,
        "stream_options": {"include_usage": True},
        "dspark_details": True,
    }
    assert Fake.seen == [
        ("/v1/completions", common | {"seed": 5, "prompt": "Once"}),
        ("/v1/chat/completions", common | {"messages": [{"role": "user", "content": "Hello"}]}),
    ]
    assert page.text("#output") == TEXT


def test_stop_ends_the_request_and_the_next_one_starts_clean(page):
    page.ask("forever")
    page.until("document.querySelectorAll('#output .t').length > 10")
    assert page.js("document.getElementById('generate').disabled")
    page.click("#stop")
    page.finished()
    assert page.text("#status") == "stopped"
    assert not page.visible("#error")
    assert Fake.gone.wait(10), "the server was not told"
    page.ask("again")
    page.finished()
    assert page.text("#output") == TEXT


def test_a_missing_key_is_asked_for_and_used(page):
    page.ask("key")
    page.until("document.activeElement.id === 'api-key'")
    assert page.text("#error-text") == "This server asks for an API key. Enter one and generate again."
    assert page.visible("#api-key")
    page.picture("error-401")
    page.call("Input.insertText", text="wrong")
    page.click("#generate")
    page.until("document.getElementById('error-text').textContent.includes('Incorrect API key provided')")
    page.finished()
    page.fill("api-key", KEY)
    page.press("Enter")
    page.until("document.getElementById('status').textContent === 'ended by itself'")
    assert not page.visible("#error")
    assert page.text("#output") == TEXT


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("full", "The server has as many requests as it takes; try again in 7 s. (1024 requests are waiting)"),
        (
            "unhealthy",
            "The server cannot serve now: it is starting, stopping or unhealthy. (the engine stopped: out of memory)",
        ),
        ("wrong", "max_tokens: found 9000, wanted at most 4096"),
        ("proxy", "The server answered with status 502."),
        ("breaks", "the step failed: page 3 is broken"),
        ("cut", "The stream ended before the answer did."),
    ],
)
def test_errors_are_shown_in_words(page, prompt, message):
    page.ask(prompt)
    page.until("!document.getElementById('error').hidden")
    page.finished()
    assert page.text("#error-text") == message
    assert page.visible("#error")
    assert not page.visible("#key-row")
    shown = "".join("".join(texts) for texts, _, _ in STEPS[:3]) if prompt in ("breaks", "cut") else ""
    assert page.text("#output") == shown, "what had arrived stays"
    page.ask("again")
    page.finished()
    assert not page.visible("#error")


def test_a_server_that_is_gone_is_told(page):
    page.js("window.fetch = () => Promise.reject(new TypeError('Failed to fetch'))")
    page.ask("anything")
    page.until("!document.getElementById('error').hidden")
    assert page.text("#error-text").startswith("The server cannot be reached")


def test_output_is_text_and_never_markup(page):
    page.ask("markup")
    page.finished()
    assert page.text("#output") == "<img src=x onerror=alert(1)>"
    assert page.count("#output img") == 0


def test_nothing_is_cut_off_on_a_phone(page):
    page.size(360, 740, phone=True)
    page.ask("long")
    page.until("document.querySelectorAll('#output .t').length > 100")
    page.click("#stop")
    page.finished()
    assert page.js("document.documentElement.scrollWidth") == 360
    outside = page.js(
        """[...document.querySelectorAll('main *')]
             .filter((e) => e.checkVisibility() && !e.closest('svg, .modes input'))
             .filter((e) => { const b = e.getBoundingClientRect(); return b.left < 0 || b.right > 360.5; })
             .map((e) => e.outerHTML.slice(0, 80))"""
    )
    assert outside == []
    assert page.js("Math.min(...[...document.querySelectorAll('button')].map((b) => b.offsetHeight))") >= 34
    page.picture("phone-light")
    page.scheme("dark")
    page.picture("phone-dark")


CONTRAST = """(() => {
  const parts = (colour) => colour.match(/[0-9.]+/g).map(Number);
  const light = (colour) => { const [r, g, b] = parts(colour).slice(0, 3)
    .map((v) => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b; };
  const behind = (e) => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
    if (parts(c).length === 3 || parts(c)[3] > 0) return c; } return "rgb(255, 255, 255)"; };
  return [...document.querySelectorAll("main *")]
    .filter((e) => e.checkVisibility() && !e.closest("svg, button:disabled")
      && [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()))
    .map((e) => { const a = light(getComputedStyle(e).color), b = light(behind(e));
      return [(Math.max(a, b) + .05) / (Math.min(a, b) + .05), e.outerHTML.slice(0, 80)]; });
})()"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_both_schemes(page, scheme):
    page.scheme(scheme)
    page.ask("long")
    page.until("document.querySelectorAll('#output .t').length > 30")
    page.js("fail('a message')")
    found = page.js(CONTRAST)
    assert len(found) > 40
    assert [entry for entry in found if entry[0] < 4.5] == []
    dark = page.js("getComputedStyle(document.body).backgroundColor") == "rgb(15, 18, 23)"
    assert dark == (scheme == "dark")


def test_all_controls_have_names_and_keys_work(page):
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    roles = {"textbox", "spinbutton", "button", "radio", "image", "region", "radiogroup"}
    named = [(n["role"]["value"], n["name"]["value"]) for n in nodes if n.get("role", {}).get("value") in roles]
    assert [role for role, name in named if not name] == []
    assert {
        ("textbox", "Prompt"),
        ("radio", "Text"),
        ("radio", "Chat"),
        ("spinbutton", "Max tokens"),
        ("spinbutton", "Temperature"),
        ("spinbutton", "Seed"),
        ("button", "Generate"),
        ("button", "Stop"),
        ("image", "Time between steps"),
    } <= set(named)
    page.js("document.getElementById('prompt').focus()")
    page.press("Enter", control=True)
    page.until("document.getElementById('status').textContent === 'ended by itself'")


def test_the_page_shows_the_step_of_the_server_itself(tab, tmp_path):
    """The bundled model behind `flashstep serve`: the page's figures are those that the server counted."""
    log = tmp_path / "log"
    with log.open("wb") as file:
        command = [sys.executable, "-m", "flashstep", "serve", "--port", "0"]
        server = subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        end = time.monotonic() + 60
        while "ready" not in (text := log.read_text()):
            assert server.poll() is None, text
            assert time.monotonic() < end, text
            time.sleep(0.1)
        found = re.search(r"http://127\.0\.0\.1:\d+", text)
        assert found, text
        tab.size(1200, 1000)
        tab.scheme("light")
        tab.call("Page.navigate", url=found[0] + "/")
        tab.until("document.readyState === 'complete' && document.getElementById('model').textContent !== ''")
        for mode in ("completion", "chat"):
            tab.click(f"label:has(input[value={mode}])")
            tab.fill("max-tokens", "48")
            tab.click("#generate")
            tab.finished()
            assert not tab.visible("#error"), tab.text("#error-text")
            assert tab.text("#status") in ("ended by itself", "reached its maximum length")
            counted = tab.js("({tokens: run.tokens, drafted: run.drafted, accepted: run.accepted, usage: run.usage})")
            assert counted["tokens"] == counted["usage"]["completion_tokens"]
            assert counted["drafted"] == counted["usage"]["dspark"]["drafted_per_position"]
            stood = counted["usage"]["dspark"]["accepted_per_position"]
            assert stood == counted["accepted"]
            assert tab.count("#output .own") > 0
            assert tab.count("#output .t:not(.own)") > 0, "no draft was accepted"
            tab.picture(f"real-{mode}")
    finally:
        server.terminate()
        server.wait(timeout=30)


def test_the_page_is_one_file_that_needs_no_other():
    html = PAGE.read_text(encoding="utf-8")
    assert re.findall(r"""(?:src|href)=["'](?!data:|x )[^"']*""", html) == []
    assert set(re.findall(r"https?://[^\s'\"]+", html)) == {"http://www.w3.org/2000/svg"}
    assert re.findall(r"innerHTML|document\.write|eval\(|@import|localStorage|cookie", html) == []
