#!/usr/bin/env python3
"""Checks the README and the pages of the book: every link leads somewhere, and they keep their shape.

A link of a page is checked as it stands in the repository: to a file, and to a heading where it has a `#`. Links to
rustdoc (`../doc/..`, beside the built book) are checked in target/doc, which must be there. The built book is checked
once more, since that is what people read: links between its pages, to their headings, and to pictures. Addresses on the
web are not visited.

`design/all_reduce.md` lists functions with their files. A function that is not in its file any more is a fault.
"""
import html.parser
import pathlib
import re
import sys
import urllib.parse

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCE, BOOK, RUSTDOC = ROOT / "docs/src", ROOT / "target/book", ROOT / "target/doc"
README_LINES, WIDTH = 250, 120
# Written by programs, whose lines are what they are.
GENERATED = {SOURCE / "guide/bug_zoo.md"}

LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\[\]]*\])*\]\(([^()\s]*(?:\([^()\s]*\)[^()\s]*)*)\)")


def prose(text):
    """The page without its blocks of code, with all its lines."""
    out, fence = [], None
    for line in text.splitlines():
        mark = re.match(r"\s*(```+|~~~+)", line)
        if mark and fence is None:
            fence = mark[1]
        elif mark and line.strip() == fence:
            fence, line = None, ""
        out.append("" if fence else re.sub(r"`[^`]*`", lambda m: "`" + "." * (len(m[0]) - 2) + "`", line))
    return out


def headings(text):
    """The anchors of a page, as GitHub and mdBook make them."""
    found = {}
    for line, shown in zip(prose(text), text.splitlines()):
        if re.match(r"#{1,6} ", line):
            words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", shown.lstrip("#").strip()).lower()
            anchor = "".join(c for c in words.replace(" ", "-") if c.isalnum() or c in "-_")
            count = found.get(anchor, -1) + 1
            found[anchor] = count
            if count:
                found[f"{anchor}-{count}"] = 0
    return set(found)


def check_page(page):
    text = page.read_text()
    name = page.relative_to(ROOT)
    for number, line in enumerate(prose(text), 1):
        where = f"{name}:{number}"
        is_prose = page not in GENERATED and "<!--" not in line and not line.lstrip().startswith(("|", "<", "!"))
        if is_prose and len(line) > WIDTH:
            yield f"{where}: {len(line)} columns"
        if re.match(r"<!-- (value|ratio) ", line):
            yield f"{where}: a comment at the start of a line ends the paragraph; put it within the sentence"
        for link in LINK.findall(line):
            target, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            if SOURCE in page.parents and target.startswith("../doc/"):
                path = RUSTDOC / target.removeprefix("../doc/")
            else:
                path = (page.parent / urllib.parse.unquote(target)).resolve() if target else page
            if not path.exists():
                yield f"{where}: {link} leads nowhere"
            elif anchor and path.suffix == ".md" and anchor not in headings(path.read_text()):
                yield f"{where}: {link}: no such heading"


CALL = re.compile(r"\| (\d+) \| `(src/[\w/]+\.rs)` \| `(\w+)` \|")


def check_calls():
    """The list of calls in design/all_reduce.md: each function is in its file, and the numbers are right."""
    page = SOURCE / "design/all_reduce.md"
    calls = [match.groups() for match in map(CALL.match, page.read_text().splitlines()) if match]
    for count, (number, file, name) in enumerate(calls, 1):
        source = (ROOT / file).read_text() if (ROOT / file).exists() else ""
        # `fn name`, or `name(..);` in a macro that writes the functions of a trait.
        if not re.search(rf"\bfn {name}\b|^\s*{name}\([\w, ]*\)( => .*)?;$", source, re.M):
            yield f"{page.relative_to(ROOT)}: {file} has no function `{name}`"
        if int(number) != count:
            yield f"{page.relative_to(ROOT)}: number {number}, and it is call {count}"
    total = f"{len(calls)} calls in {len({file for _, file, _ in calls})} files."
    if f"\n{total}" not in page.read_text():
        yield f"{page.relative_to(ROOT)}: the list has {total}"


class Html(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.links, self.names = [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.names.add(attributes.get("id"))
        self.links += [attributes[key] for key in ("href", "src") if attributes.get(key) and tag in ("a", "img")]


def check_book():
    pages = {path: Html(path.read_text()) for path in BOOK.rglob("*.html")}
    for path, page in pages.items():
        for link in page.links:
            target, _, anchor = urllib.parse.unquote(link).partition("#")
            # `print.html` has all pages in one, with their links as they were. `404.html` is served at any address.
            if re.match(r"[a-z]+:", target) or path.name in ("print.html", "404.html"):
                continue
            other = (path.parent / target).resolve() if target else path
            if not other.exists():
                yield f"{path.relative_to(ROOT)}: {link} leads nowhere"
            elif anchor and other in pages and anchor not in pages[other].names:
                yield f"{path.relative_to(ROOT)}: {link}: no such heading"


def main():
    pages = [ROOT / "README.md", *sorted(SOURCE.rglob("*.md"))]
    faults = [fault for page in pages for fault in check_page(page)]
    faults += check_calls()
    lines = len((ROOT / "README.md").read_text().splitlines())
    if lines > README_LINES:
        faults.append(f"README.md has {lines} lines; {README_LINES} are a page that people read")
    summary = (SOURCE / "SUMMARY.md").read_text()
    for page in pages[1:]:
        name = page.relative_to(SOURCE).as_posix()
        if name != "SUMMARY.md" and f"({name})" not in summary:
            faults.append(f"docs/src/{name} is not in SUMMARY.md")
    if not BOOK.exists():
        faults.append("target/book is not there: .ci/book.sh builds it")
    faults += check_book()
    if faults:
        sys.exit("\n".join(faults))
    print(f"{len(pages)} pages: links, headings and widths are right")


if __name__ == "__main__":
    main()
