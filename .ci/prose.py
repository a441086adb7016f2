#!/usr/bin/env python3
"""The words of the guide and of rustdoc's public pages. Usage: .ci/prose.py, after `cargo doc --workspace`.

It reads the Markdown files of the book and of the root, the README files, the comments of the examples, and the pages
in target/doc. Code, titles, and the heads of tables are left out. A fault is:

* a clause with "what" or "who" in place of a noun: "what fails is", "it takes what you give". Name the thing. Questions
  are allowed: "What does it cost?", "the error says what is missing";
* "nobody", "somebody", "whoever", "whatever": name the subject;
* "at once": "in parallel" or "immediately";
* a word that only this code had once, where the field has its own: `PRIVATE`.

(`vale` would do. Its package in PyPI is a script that fetches the program from elsewhere, which CI cannot reach.)
"""

import html
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = [
    *sorted(ROOT.glob("docs/src/**/*.md")), *sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("crates/*/README.md")),
    *sorted(ROOT.glob("tests/*/README.md")), ROOT / "benches/results/README.md",
]
EXAMPLES = sorted(ROOT.glob("examples/**/*.rs"))
# Written by a program, with titles of public threads.
GENERATED = "docs/src/guide/bug_zoo"
PRIVATE = r"headlines?|patience|restless|make-up|in-short"
# A question follows: "says what is missing".
ASKS = (
    r"(?:says?|said|tells?|told|knows?|known|asks?|asked|sees?|shows?|decides?|explains?|finds? out|looks?)"
    r"(?: you| it| exactly)?[ ,:]+$"
)
FAULTS = [
    (re.compile(r"\b(?:nobody|somebody|whoever|whatever)\b", re.I), "name the subject"),
    (re.compile(r"\bat once\b", re.I), '"in parallel" or "immediately"'),
    (re.compile(rf"\b(?:{PRIVATE})\b", re.I), "the field has a word for it"),
]
CLAUSE = re.compile(r"\b(?:what|who)\b", re.I)


def faults(text):
    """The faults of a paragraph: the words around each, and what to write instead."""
    text = re.sub(r"\s+", " ", text)
    for pattern, advice in FAULTS:
        for match in pattern.finditer(text):
            yield text[max(0, match.start() - 40) : match.end() + 40], advice
    for sentence in re.split(r"(?<=[.!?:;])\s+", text):
        for match in CLAUSE.finditer(sentence):
            before = sentence[: match.start()]
            asked = sentence.rstrip(" *_)").endswith("?") or re.search(ASKS, before)
            # "says who failed and what it did": the question begins before.
            if not asked and not re.search(rf"{ASKS[:-1]}(?:what|who|how|which|where|whether)\b", before):
                yield sentence[max(0, match.start() - 40) : match.end() + 40], "a noun in place of the clause"


def markdown(page):
    """The paragraphs of a page with their first lines. A row of a table is one, as is an item of a list."""
    lines, fence, paragraph, start = page.read_text().splitlines(), False, [], 1
    for number, line in enumerate([*lines, ""], 1):
        row = line.lstrip().startswith("|")
        begins = row or not line.strip() or re.match(r"\s*(?:[-*]|\d+\.|<|#|```)", line)
        if begins and paragraph:
            yield start, " ".join(paragraph)
            paragraph = []
        if line.lstrip().startswith("```"):
            fence = not fence
        is_head = row and number < len(lines) and lines[number].lstrip().startswith("|---")
        if fence or is_head or not line.strip() or line.lstrip().startswith(("```", "#", "<")):
            continue
        start = start if paragraph else number
        # Links are titles of pages, and a paragraph may begin with one of its own.
        line = re.sub(r"\[[^\]]*\]\([^)]*\)", "x", line)
        line = line if paragraph else re.sub(r"^\s*(?:[-*] )?\*\*.*?\*\*", "", line)
        paragraph.append(re.sub(r"`[^`]*`|<!--.*?-->", "x", line).strip())


def comments(source):
    """The paragraphs of a program's comments, with their first lines. One behind code is a paragraph."""
    paragraph, start = [], 1
    for number, line in enumerate([*source.read_text().splitlines(), ""], 1):
        text = re.search(r"(^|\s)//[/!]? (.*)", line)
        alone = bool(re.match(r"\s*//[/!]? \S", line))
        if paragraph and not alone:
            yield start, " ".join(paragraph)
            paragraph = []
        if text:
            words = re.sub(r"`[^`]*`", "x", text[2])
            start = start if paragraph else number
            paragraph.append(words)
            if not alone:
                yield start, paragraph.pop()


def rustdoc(page):
    """The paragraphs of the documentation on a page."""
    text = page.read_text().partition('id="blanket-implementations"')[0]  # Those have the standard library's words.
    text = re.sub(r"<(pre|h\d|thead|code|a)\b.*?</\1>", "x", text, flags=re.S)
    for block in re.findall(r'<div class="docblock[^"]*">(.*?)</div>', text, re.S):
        for paragraph in re.split(r"</?(?:p|li|td|tr|ul|ol|table)\b[^>]*>", block):
            yield html.unescape(re.sub(r"<[^>]+>", "", paragraph))


def main():
    found = []
    for page in PAGES:
        name = page.relative_to(ROOT).as_posix()
        if not name.startswith(GENERATED):
            for line, text in markdown(page):
                found += [f"{name}:{line}: ..{words}..: {advice}" for words, advice in faults(text)]
    for source in EXAMPLES:
        for line, text in comments(source):
            name = source.relative_to(ROOT).as_posix()
            found += [f"{name}:{line}: ..{words}..: {advice}" for words, advice in faults(text)]
    public = {}
    for page in sorted(ROOT.glob("target/doc/gpu_pool*/**/*.html")):
        for text in rustdoc(page):
            for words, advice in faults(text):
                public.setdefault(f"..{words.strip()}..: {advice}", page.relative_to(ROOT))
    found += [f"{page}: {fault}" for fault, page in public.items()]
    if found:
        sys.exit("\n".join(found) + f"\n{len(found)} places that are hard to read")
    print(f"{len(PAGES)} pages, {len(EXAMPLES)} files of examples and rustdoc have plain sentences")


if __name__ == "__main__":
    main()
