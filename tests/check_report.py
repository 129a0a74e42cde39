"""Open a report in headless Chromium (Debian's package `chromium`) on a phone and on a desktop, in light and in dark.

    python tests/check_report.py                       a report of made-up results
    python tests/check_report.py FOLDER/report.html    one of an evaluation
    python tests/check_report.py --screenshots FOLDER  keep the pictures

Exits with 1 where a page scrolls sideways, a part lies outside of it or is wider than its box, a figure's text is cut off or
smaller than 8 pixels, or anything but the file itself was asked for. Speaks to the browser over its DevTools pipe; needs no
package.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from report_sample import sample_bench, sample_results

from hf_drope.report import write_report

WIDTHS = {"phone": 360, "desktop": 1200}
SMALLEST_TEXT = 8.0
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
]
# Every fold opened, so that what is in it counts as well.
MEASURE = """(() => {
  document.querySelectorAll('details').forEach(fold => { fold.open = true; });
  const wide = document.documentElement.clientWidth;
  const outside = [...document.body.querySelectorAll('*')].filter(part => {
    const box = part.getBoundingClientRect();
    return box.width > 0 && (box.right > wide + 1 || box.left < -1) && !part.closest('.scroll, svg svg, defs');
  }).map(part => part.tagName + ' ' + (part.textContent || '').trim().slice(0, 60));
  const texts = [...document.querySelectorAll('svg text')].map(text =>
    parseFloat(getComputedStyle(text).fontSize) * Math.hypot(text.getScreenCTM().c, text.getScreenCTM().d));
  const cut = [...document.querySelectorAll('svg text')].filter(text => {
    const box = text.getBoundingClientRect(), svg = text.ownerSVGElement.getBoundingClientRect();
    return box.right > svg.right + 1 || box.left < svg.left - 1;
  }).map(text => text.textContent);
  const spills = [...document.querySelectorAll('body *:not(.scroll, svg, svg *)')].filter(part =>
    part.clientWidth > 0 && part.scrollWidth > part.clientWidth + 1
  ).map(part => part.tagName + ' ' + part.textContent.trim().slice(0, 60));
  return {spills, scrolls: document.documentElement.scrollWidth - wide, outside, cut, smallest: Math.min(...texts, 99),
          height: document.documentElement.scrollHeight, figures: document.querySelectorAll('svg').length};
})()"""


class Browser:
    """The few DevTools commands that are needed, one at a time."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back = os.fdopen(to, "wb", 0), os.fdopen(back, "rb", 0)
        self._rest, self._count, self.session = b"", 0, ""
        self.asked: list[str] = []

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        self._to.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def wait_for(self, event: str) -> None:
        while self._read().get("method") != event:
            pass

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._back.fileno(), 1 << 16)
            if not part:
                raise RuntimeError("Chromium ended.")
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        answer = json.loads(line)
        if answer.get("method") == "Network.requestWillBeSent":
            self.asked.append(answer["params"]["request"]["url"])
        return answer


@contextmanager
def browser(chromium: str) -> Iterator[Browser]:
    (read, to), (back, write) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # DevTools speaks on descriptors 3 and 4, whatever the pipes are called here.
        shell = f'exec "$0" "$@" 3<&{read} 4>&{write}'
        process = subprocess.Popen(
            ["bash", "-c", shell, chromium, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(read, write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read)
        os.close(write)
        found = Browser(to, back)
        try:
            target = found.call("Target.createTarget", url="about:blank")["targetId"]
            found.session = found.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            found.call("Network.enable")
            found.call("Page.enable")
            yield found
            found.session = ""
            found.call("Browser.close")
        finally:
            process.terminate()
            process.wait()


def check(page: Browser, report: Path, pictures: Path | None) -> bool:
    passed = True
    address = report.resolve().as_uri()
    for device, width in WIDTHS.items():
        for scheme in ("light", "dark"):
            page.asked.clear()
            page.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)
            features = [{"name": "prefers-color-scheme", "value": scheme}]
            page.call("Emulation.setEmulatedMedia", features=features)
            page.call("Page.navigate", url=address)
            page.wait_for("Page.loadEventFired")
            if pictures is not None:
                take_picture(page, width, pictures / f"{device}-{scheme}.png")
            found = page.call("Runtime.evaluate", expression=MEASURE, returnByValue=True)["result"]["value"]
            if pictures is not None:
                take_picture(page, width, pictures / f"{device}-{scheme}-unfolded.png")
            others = [url for url in page.asked if url != address and not url.startswith("data:")]
            faults = [
                *([f"scrolls {found['scrolls']} pixels sideways"] if found["scrolls"] > 0 else []),
                *(f"outside: {text}" for text in found["outside"][:5]),
                *(f"wider than its box: {text}" for text in found["spills"][:5]),
                *(f"cut off: {text}" for text in found["cut"][:5]),
                *([f"text of {found['smallest']:.1f} pixels"] if found["smallest"] < SMALLEST_TEXT else []),
                *(f"asked for {url}" for url in others),
            ]
            passed &= not faults
            print(
                f"{device} {width} px, {scheme}: {found['figures']} figures, {found['height']} px high, smallest text "
                f"{found['smallest']:.1f} px, {len(others)} requests: {'; '.join(faults) or 'good'}",
                flush=True,
            )
    return passed


def take_picture(page: Browser, width: int, file: Path) -> None:
    found = page.call("Runtime.evaluate", expression="document.documentElement.scrollHeight", returnByValue=True)
    # A taller picture is more than the browser draws at once.
    clip = {"x": 0, "y": 0, "width": width, "height": min(found["result"]["value"], 16000), "scale": 1}
    picture = page.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
    file.write_bytes(base64.b64decode(picture["data"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", nargs="?", type=Path)
    parser.add_argument("--screenshots", type=Path)
    parser.add_argument("--chromium", default="chromium")
    arguments = parser.parse_args()
    if arguments.screenshots is not None:
        arguments.screenshots.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work, browser(arguments.chromium) as page:
        report = arguments.report
        if report is None:
            (Path(work) / "results.json").write_text(json.dumps(sample_results()))
            (Path(work) / "bench.json").write_text(json.dumps(sample_bench()))
            report = write_report(work, Path(work) / "bench.json")[0]
        return 0 if check(page, report, arguments.screenshots) else 1


if __name__ == "__main__":
    sys.exit(main())
