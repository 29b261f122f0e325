"""Look at every page of the built book in a real browser, and say what a reader would stumble on.

    python tools/pages.py [HTML_DIR] [--shots DIR]

Pages are opened from disk with nothing else reachable, on a phone and on a wide screen.
"""

import argparse
import shutil
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

from playwright.sync_api import Error, sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--no-first-run"]
WIDTHS = (390, 1280)  # a phone, a laptop
LOCAL = ("file:", "data:", "blob:")
MATH_TIMEOUT = 10_000  # ms

MATH_IS_SET = """() => !window.MathJax || MathJax.startup.promise.then(() => [
    ...document.querySelectorAll('.math')].every(e => e.querySelector('mjx-container')))"""

# Runs in the page. Text is searched also where it is folded away, but not where it is code or
# typeset, nor in a title's pilcrow link.
INSPECT = r"""async () => {
  const faults = [];
  const short = text => JSON.stringify(text.trim().slice(0, 60));
  for (const e of document.querySelectorAll('.math'))
    if (!e.querySelector('mjx-container'))
      faults.push('math not rendered: ' + short(e.textContent));
  for (const e of document.querySelectorAll('mjx-merror'))
    faults.push('math error: ' + short(e.getAttribute('title') || e.textContent));

  const role = '\\{(?:[a-z]+:[a-z]+|eq|ref|numref|cite|doc|term|math|any|download|glue)\\}';
  const raw = new RegExp('\\$|\\\\[a-zA-Z]+|' + role + '|:::|```');
  const skip = 'code, pre, script, style, noscript, textarea, mjx-container';
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, found = raw.exec(node.data);
    if (found && !node.parentElement.closest(skip))
      faults.push('raw markup ' + found[0] + ' in ' + short(node.data.slice(
        Math.max(0, found.index - 25))));
  }

  for (const image of document.images) {
    image.loading = 'eager';
    if (!await image.decode().then(() => true, () => false))
      faults.push('image not loaded: ' + image.getAttribute('src').slice(0, 80));
  }

  const view = document.scrollingElement;
  if (view.scrollWidth > view.clientWidth) {
    const wide = [...document.querySelectorAll('main *')].filter(
      e => e.getBoundingClientRect().right > view.clientWidth + 1).pop();
    faults.push(`scrolls sideways: ${view.scrollWidth} px of content on ${view.clientWidth} px; `
      + 'look at ' + (wide ? short(wide.outerHTML) : 'the frame of the page'));
  }
  return faults;
}"""


def browser_path():
    """The browser on PATH, or None."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def html_pages(html_dir):
    """Every page for readers: not the theme's own files, not the redirect at the root."""
    for path in sorted(Path(html_dir).rglob("*.html")):
        inside = path.relative_to(html_dir).parts[0] not in ("_static", "_sources")
        if inside and 'http-equiv="Refresh"' not in path.read_text(encoding="utf-8"):
            yield path


@contextmanager
def browser():
    """A headless browser; raises with the repair if there is none."""
    program = browser_path()
    if program is None:
        raise FileNotFoundError(
            f"expected one of {', '.join(BROWSERS)} on PATH and found none; "
            "on Debian: apt-get install chromium")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=program, args=FLAGS)
        try:
            yield launched
        finally:
            launched.close()


def open_page(context, path):
    """Open one page, wait for its math; returns the tab and the list where its faults gather."""
    tab, faults = context.new_page(), []

    def refuse(route):
        faults.append(f"asks for something that is not on disk: {route.request.url}")
        route.abort()

    def failed(request):
        if request.url.startswith(LOCAL):
            faults.append(f"request failed: {request.url}")

    def said(message):
        if message.type == "error":
            faults.append(f"console error: {message.text}")

    tab.route(lambda url: not url.startswith(LOCAL), refuse)
    tab.on("requestfailed", failed)
    tab.on("console", said)
    tab.on("pageerror", lambda error: faults.append(f"script error: {error.message}"))
    tab.goto(path.absolute().as_uri())
    with suppress(Error):  # INSPECT names the formulas that are not set
        tab.wait_for_function(MATH_IS_SET, timeout=MATH_TIMEOUT)
    return tab, faults


def page_faults(html_dir, widths=WIDTHS):
    """All faults of all pages at all widths, each as `page at width px: fault`."""
    html_dir = Path(html_dir)
    paths = list(html_pages(html_dir))
    if not paths:
        return [f"expected HTML pages in {html_dir} and found none: run `make book` first"]
    complaints = []
    with browser() as launched:
        for width in widths:
            context = launched.new_context(viewport={"width": width, "height": 900})
            for path in paths:
                tab, faults = open_page(context, path)
                faults += tab.evaluate(INSPECT)
                name = path.relative_to(html_dir)
                complaints += [f"{name} at {width} px: {fault}" for fault in faults]
                tab.close()
            context.close()
    return complaints


def take_shots(html_dir, folder):
    """Whole-page screenshots for people: wide, phone and dark."""
    looks = {"wide": (1280, "light"), "phone": (390, "light"), "dark": (1280, "dark")}
    Path(folder).mkdir(parents=True, exist_ok=True)
    with browser() as launched:
        for look, (width, scheme) in looks.items():
            context = launched.new_context(viewport={"width": width, "height": 900},
                                           color_scheme=scheme)
            for path in html_pages(html_dir):
                tab, _ = open_page(context, path)
                name = "-".join(path.relative_to(html_dir).with_suffix("").parts)
                tab.screenshot(path=Path(folder) / f"{name}-{look}.png", full_page=True)
                tab.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("html_dir", nargs="?", default="_build/html")
    parser.add_argument("--shots", metavar="DIR", help="also save screenshots there")
    args = parser.parse_args()
    if args.shots:
        take_shots(args.html_dir, args.shots)
    complaints = page_faults(args.html_dir)
    print("\n".join(complaints) or f"{len(list(html_pages(args.html_dir)))} pages without a fault")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
