"""Every built page in a real browser, on a phone and on a wide screen."""

import warnings
from pathlib import Path

import pytest

import pages

ROOT = Path(__file__).parents[2]

PAGE = """<!DOCTYPE html><html><head><link rel="icon" href="data:,"><title>x</title></head>
<body style="margin: 0">{}</body></html>"""


def need_browser():
    if pages.browser_path() is None:
        reason = "NO BROWSER FOUND: THE PAGES WERE NOT LOOKED AT. Install chromium to test them."
        warnings.warn(reason, stacklevel=2)
        pytest.skip(reason)


def test_the_book_has_no_faults_a_reader_would_see():
    html = ROOT / "_build" / "html"
    if not (html / "index.html").is_file():
        pytest.fail(f"expected the built book in {html.relative_to(ROOT)}: run `make book` first")
    need_browser()
    complaints = pages.page_faults(html)
    assert not complaints, "\n".join(complaints)


FAULTY = {
    "dollar": ("it costs $x$", "raw markup $"),
    "environment": (r"<details>\begin{aligned}</details>", r"raw markup \begin"),
    "tag": (r"so \tag{1}", r"raw markup \tag"),
    "proof role": ("{prf:ref}<code>thm</code>", "raw markup {prf:ref}"),
    "equation role": ("{eq}`eq-one`", "raw markup {eq}"),
    "cite role": ("{cite}`one`", "raw markup {cite}"),
    "fence": (":::{note}", "raw markup :::"),
    "math": ('<span class="math">x</span>', "math not rendered"),
    "math error": ('<span class="math"><mjx-container><mjx-merror title="Undefined">x'
                   "</mjx-merror></mjx-container></span>", "math error"),
    "lost file": ('<script src="lost.js"></script>', "request failed"),
    "remote file": ('<script src="https://example.org/far.js"></script>', "not on disk"),
    "console": ('<script>console.error("broken")</script>', "console error: broken"),
    "script": ('<script>throw new Error("broken")</script>', "script error: broken"),
    "lost image": ('<img alt="" src="data:image/png;base64,aGVsbG8=">', "image not loaded"),
    "wide": ('<main><div style="width: 500px">x</div></main>', "scrolls sideways: 500 px"),
}


def test_each_fault_is_found_and_nothing_else(tmp_path):
    need_browser()
    good = "<p>fine <code>$x$ :::</code></p><div style='overflow-x:auto'><pre>{}</pre></div>"
    (tmp_path / "good.html").write_text(PAGE.format(good.format("$" * 500)))
    for name, (body, _) in FAULTY.items():
        (tmp_path / f"{name}.html").write_text(PAGE.format(body))
    complaints = pages.page_faults(tmp_path, widths=[390])
    assert not [line for line in complaints if line.startswith("good.html")]
    for name, (_, fault) in FAULTY.items():
        assert any(line.startswith(f"{name}.html at 390 px: ") and fault in line
                   for line in complaints), (name, complaints)


def test_a_folder_without_pages_is_a_fault(tmp_path):
    assert "run `make book` first" in pages.page_faults(tmp_path)[0]
