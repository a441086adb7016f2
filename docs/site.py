#!/usr/bin/env python3
"""Puts the book and rustdoc into one tree that any server of files can host: target/site.

Usage: docs/site.py, after `.ci/book.sh` (which runs it). The tree is `index.html`, `book/`, `doc/` and `files/`:

* The book links to rustdoc by `../doc/..`, as in `target`.
* Each page of rustdoc gets a link to the book, in its sidebar.
* The book's links to files of the repository lead to copies in `files/`.
"""
import os
import pathlib
import re
import shutil

ROOT = pathlib.Path(__file__).resolve().parent.parent
SITE = ROOT / "target/site"
FRONT = '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url=book/index.html">\n'
FOLDERS = r"\.ci|benches|crates|examples|kernels|loom_tests|src|tests"
LINK = re.compile(rf'href="((?:\.\./)+)((?:{FOLDERS})/[^"#]+|[A-Z]+\.md)')
SIDEBAR = re.compile(r'(<nav class="sidebar">)')


def relative(path, page):
    return pathlib.Path(os.path.relpath(path, page.parent)).as_posix()


def main():
    shutil.rmtree(SITE, ignore_errors=True)
    for part in "book", "doc":
        shutil.copytree(ROOT / "target" / part, SITE / part)
    (SITE / "index.html").write_text(FRONT)
    for page in SITE.glob("book/**/*.html"):
        built = ROOT / "target" / page.relative_to(SITE)

        def file(match, page=page, built=built):
            source = (built.parent / match[1] / match[2]).resolve()
            if not source.is_file() or ROOT / "target" in source.parents or ROOT not in source.parents:
                return match[0]
            copy = SITE / "files" / source.relative_to(ROOT)
            copy = copy.with_name(copy.name + ".txt")  # Servers show text, and offer `.rs` to be saved.
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)
            return f'href="{relative(copy, page)}'

        page.write_text(LINK.sub(file, page.read_text()))
    for page in SITE.glob("doc/gpu_pool*/**/*.html"):
        book = f'<p style="margin: 0.8rem 1rem"><a href="{relative(SITE / "book/index.html", page)}">The book</a></p>'
        page.write_text(SIDEBAR.sub(rf"\1{book}", page.read_text(), count=1))
    print(f"{SITE.relative_to(ROOT)}: {sum(1 for _ in SITE.rglob('*.html'))} pages")


if __name__ == "__main__":
    main()
