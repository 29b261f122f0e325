"""The command `heads`: from a model's folder and text files to a table, two files and a picture."""

import argparse
import csv
import io
import json
import sys
from pathlib import Path

import torch

from measureattn._files import write_atomically
from measureattn.heads.collector import Windows, collect, windows
from measureattn.heads.models import load
from measureattn.heads.report import HeadReport, measure_heads

LENGTHS = (512, 1024, 2048, 4096, 8192)  # of the prompts whose errors are measured


def add_heads(subparsers) -> argparse.ArgumentParser:
    """The parser of `heads`, added to the given subparsers."""
    parser = subparsers.add_parser(
        "heads",
        help="measure how linear the attention heads of a model are",
        description="Measure how linear each attention head of a transformers model is on long "
        "prompts, how long is long, and what stands in the way (chapter 11). Writes heads.csv, "
        "heads.json and heads.png; can be stopped at any time: finished layers are kept.",
    )
    parser.add_argument("--model", required=True, type=Path, help="folder of a transformers model")
    parser.add_argument("--text", required=True, nargs="+", type=Path, help="files of plain text")
    parser.add_argument("--out", required=True, type=Path, help="folder for the results")
    parser.add_argument("--layers", nargs="+", type=int, help="layers to measure (all)")
    parser.add_argument("--max-tokens", type=_positive, help="tokens to use at most (all)")
    parser.add_argument(
        "--window", type=_positive, help="tokens of a window (256 if there is room)"
    )
    parser.add_argument("--special", action="store_true", help="keep special tokens in the pool")
    parser.add_argument("--queries", type=_queries, default=200, help="a number (200), or all")
    parser.add_argument("--tolerance", type=float, default=0.1, help="relative error (0.1)")
    parser.add_argument("--seed", type=int, default=0, help="of the queries and the prompts (0)")
    parser.set_defaults(run=run_heads)
    return parser


def run_heads(args: argparse.Namespace) -> int:
    """Measure, print and write; 0 if all is done, 2 on bad input, 130 if interrupted."""
    try:
        texts = [read_text(path) for path in args.text]
        if not args.tolerance > 0:
            raise ValueError(f"--tolerance must be above 0, got {args.tolerance}")
        model, tokenizer = load(args.model)
        pool = windows(
            model, tokenizer, texts,
            length=args.window, max_tokens=args.max_tokens, special=args.special,
        )  # fmt: skip
        args.out.mkdir(parents=True, exist_ok=True)
        return _measure(model, pool, args)
    except (ImportError, OSError, ValueError) as error:
        return _say(2, _one_line(error))
    except KeyboardInterrupt:
        return _say(130, "stopped before the first layer was finished")


def read_text(path: Path) -> str:
    """The text of a file; ValueError if it is empty or no text, OSError if it cannot be read."""
    content = path.read_bytes()
    if not content.strip():
        raise ValueError(f"{path} is empty")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text: byte {error.start} cannot be read") from None
    if "\0" in text:
        raise ValueError(f"{path} is no text: it has a zero byte at {text.index(chr(0))}")
    return text


def _measure(model, pool: Windows, args: argparse.Namespace) -> int:
    """Layer by layer; each finished layer is in the files before the next one begins."""
    many = len(set(args.layers or range(model.config.num_hidden_layers)))
    generator = torch.Generator().manual_seed(args.seed)
    reports, left_out = [], ()
    _progress(0, many)
    try:
        for found in collect(model, pool, args.layers):
            report = measure_heads(
                found.queries, found.keys, found.values, names=found.names, labels=pool.labels,
                n_queries=args.queries, tolerance=args.tolerance, lengths=LENGTHS,
                generator=generator,
            )  # fmt: skip
            reports, left_out = [*reports, report], found.left_out
            del found  # before the next layer's arrays are made
            _write_tables(HeadReport.join(reports), pool, left_out, args)
            _progress(len(reports), many)
    except KeyboardInterrupt:
        if not reports:
            raise
    report = HeadReport.join(reports)
    _write_picture(report, args.out)
    print(report)
    print(f"\n{pool.n_tokens:,} tokens in {len(pool.ids)} windows.", *_left_out(left_out))
    written = ", ".join(sorted(path.name for path in args.out.glob("heads.*")))
    print(f"Written to {args.out}: {written}")
    if len(reports) < many:
        return _say(130, f"stopped after {len(reports)} of {many} layers; these are written")
    return 0


def _left_out(words: tuple[str, ...]) -> list[str]:
    return [f"Left out: {'; '.join(words)}."] if words else []


def _write_tables(report: HeadReport, pool: Windows, left_out, args) -> None:
    rows = report.rows()
    table = io.StringIO()
    writer = csv.DictWriter(table, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    facts = {
        "model": args.model.resolve().name,
        "tokens": pool.n_tokens,
        "window": pool.ids.shape[1],
        "special_tokens_kept": args.special,
        "queries": report.share.n,
        "tolerance": args.tolerance,
        "seed": args.seed,
        "left_out": list(left_out),
    }
    rows = [{key: None if x != x else x for key, x in row.items()} for row in rows]  # JSON: no NaN
    text = json.dumps(facts | {"heads": rows}, indent=1) + "\n"
    write_atomically(args.out / "heads.csv", table.getvalue().encode())
    write_atomically(args.out / "heads.json", text.encode())


def _write_picture(report: HeadReport, folder: Path) -> None:
    try:
        from measureattn.figures import head_map, house_style, plt
    except ImportError:
        _say(0, "no picture without matplotlib: pip install 'measureattn[heads]'")
        return
    layers = list(dict.fromkeys(name.split(".")[0] for name in report.names))
    plt.switch_backend("agg")
    house_style()
    figure, _ = head_map(report.share.value.reshape(len(layers), -1).numpy(force=True), layers)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    plt.close(figure)
    write_atomically(folder / "heads.png", picture.getvalue())


def _progress(done: int, many: int) -> None:
    if sys.stderr.isatty():
        bar = "#" * (30 * done // many)
        end = "\n" if done == many else ""
        print(f"\r[{bar:<30}] layer {done} of {many}", end=end, file=sys.stderr, flush=True)


def _say(code: int, message: str) -> int:
    print(f"python -m measureattn heads: {message}", file=sys.stderr)
    return code


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return ": ".join(str(x) for x in (error.filename, error.strerror) if x)
    return " ".join(str(error).split())


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text}")
    return int(text)


def _queries(text: str) -> int | None:
    return None if text == "all" else _positive(text)
