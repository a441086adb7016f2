#!/usr/bin/env python3
"""Each public function that can fail says where it was called.

Usage: .ci/places.py [FOLDER], the folder of the crate's pages (default target/doc/gpu_pool). It checks:

* No closure has `Location::caller()`: there it is the library's own line, since `#[track_caller]` does not reach into
  closures. The same holds for the other functions of this crate that take the caller's place, unless the function
  around the closure has entered its operation before (`OpSite::here`), whose place goes before.
* Each public function with the crate's `Result` is `#[track_caller]`, and so is each function that takes the caller's
  place.
* `tests/faults/places.rs` calls each of them wrongly, or says why it does not.

The public functions are those on rustdoc's pages. So none is forgotten, whatever macro has made it.
"""

import html
import pathlib
import re
import sys

sys.dont_write_bytecode = True
from rust.tokens import brackets, tokenize, without_tests

ROOT = pathlib.Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests/faults/places.rs"
# Functions that take the place of their caller, by their last two names.
TAKES_PLACE = {
    ("Location", "caller"), ("OpSite", "here"), ("Error", "invalid"), ("Error", "wrong_pool"),
    ("Error", "wrong_device"), ("Error", "borrowed"), ("Call", "new"),
}
METHOD = re.compile(
    r'<section id="(?:method|tymethod)\.(\w+)" class="method">(.*?)<h4 class="code-header">(.*?)</h4>', re.DOTALL
)
FUNCTION = re.compile(r'<pre class="rust item-decl"><code>(.*?)</code></pre>', re.DOTALL)
SOURCE = re.compile(r'class="src[^"]*" href="[./]*src/gpu_pool/([^"#]+)\.html#(\d+)')


def plain(text):
    return html.unescape(re.sub(r"<[^>]+>", "", text))


def can_fail(signature):
    """Whether a declaration returns the crate's result."""
    returned = plain(signature.split('<div class="where">')[0]).rpartition("->")[2]
    return bool(re.match(r"\s*Result<", returned)) and "type gpu_pool::error::Result" in signature


def public_functions(folder):
    """`Type::name` or `name` of each public function that can fail: its file and line."""
    found = {}
    for page in re.findall(r'href="([\w/]+\.(\w+)\.html)"', (folder / "all.html").read_text()):
        path, name = folder / page[0], page[1]
        text, kind = path.read_text(), path.name.split(".")[0]
        if kind == "fn":
            declarations = [(name, text, FUNCTION.search(text)[1])]
        elif kind in ("struct", "enum", "union"):
            # Impls of the standard library's and of other crates' traits return other results.
            declarations = [(f"{name}::{method}", link, text) for method, link, text in METHOD.findall(text)]
        else:
            continue
        for function, link, signature in declarations:
            if can_fail(signature) and (source := SOURCE.search(link)):
                found[function] = (ROOT / "src" / source[1], int(source[2]))
    return found


def has_track_caller(file, line):
    """Whether the attributes above a line say `#[track_caller]`."""
    lines = file.read_text().splitlines()
    at = line - 1
    if "#[track_caller]" in lines[at]:
        return True
    while at > 0 and lines[at - 1].lstrip().startswith(("#[", "///", "//", "#![")):
        at -= 1
        if lines[at].strip() == "#[track_caller]":
            return True
    return False


def functions(tokens, ends):
    """Each function with a body: whether it is `#[track_caller]`, and its first and last token."""
    stamped = [(at, ends[at + 2]) for at, token in enumerate(tokens[:-2]) if token.text == "collectives"
               and tokens[at + 1].text == "!" and tokens[at + 2].text == "{"]
    for at, token in enumerate(tokens[:-1]):
        if token.text != "fn" or token.kind != "ident" or tokens[at + 1].kind not in ("ident", "punct"):
            continue
        body = at
        while body < len(tokens) and tokens[body].text not in ("{", ";", "}"):
            body = ends[body] + 1 if tokens[body].text in ("(", "[") else body + 1
        if body >= len(tokens) or tokens[body].text != "{":
            continue
        # The macro `collectives!` adds the attribute.
        first, tracks = at - 1, any(start < at < end for start, end in stamped)
        while first >= 0 and (tokens[first].kind in ("attr", "other") or tokens[first].text in
                              ("pub", "unsafe", "const", "extern", ")", "crate", "super", "(", "in")):
            tracks |= tokens[first].kind == "attr" and any(word.text == "track_caller" for word in tokens[first].inner)
            first -= 1
        yield tracks, body, ends[body]


def closures(tokens, ends):
    """The bodies of all closures."""
    for at, token in enumerate(tokens):
        before = tokens[at - 1] if at else token
        begins = before.text in ("(", ",", "=", "{", ";", "=>", "return", "move", "&", "else", "&&", "||", "[")
        if token.kind != "punct" or token.text not in ("|", "||") or not begins:
            continue
        start = at + 1
        if token.text == "|":
            while start < len(tokens) and tokens[start].text != "|":
                start = ends[start] + 1 if tokens[start].text in ("(", "[") else start + 1
            start += 1
        end = start
        while end < len(tokens) and tokens[end].text not in (",", ";", ")", "]", "}"):
            closes = tokens[end].text in ("(", "[", "{")
            end = ends[end] + 1 if closes else end + 1
            if closes and tokens[end - 1].text == "}" and end - 1 == ends.get(start):
                break
        yield start, end


def takes_place(tokens, start, end):
    for at in range(start, end - 3):
        path = (tokens[at].text, tokens[at + 2].text)
        if path in TAKES_PLACE and tokens[at + 1].text == "::" and tokens[at + 3].text == "(":
            yield at, "::".join(path)


def check_sources():
    for file in sorted((ROOT / "src").rglob("*.rs")):
        name = file.relative_to(ROOT)
        # No call of a user's is in a driver; a `Call` there is one of the driver.
        if "tests" in file.stem or "tests" in name.parts or name.parts[1] == "driver":
            continue
        tokens = without_tests(tokenize(file.read_text()))
        ends = brackets(tokens)
        in_closures = {at for start, end in closures(tokens, ends) for at, _ in takes_place(tokens, start, end)}
        innermost = {}
        for tracks, start, end in functions(tokens, ends):  # Inner ones come after the ones around them.
            enters = any(what == "OpSite::here" and at not in in_closures for at, what in takes_place(tokens, start, end))
            for at, what in takes_place(tokens, start, end):
                innermost[at] = (what, tracks, enters and what != "OpSite::here")
        for at, (what, tracks, enters) in sorted(innermost.items()):
            if at in in_closures and not enters:
                yield f"{name}:{tokens[at].line}: {what} in a closure, which is no `#[track_caller]`"
            elif not tracks:
                yield f"{name}:{tokens[at].line}: {what} in a function without `#[track_caller]`"


def main():
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "target/doc/gpu_pool").resolve()
    if not (folder / "all.html").is_file():
        sys.exit(f"{folder} has no list of all items: run cargo doc first")
    public, wrong = public_functions(folder), list(check_sources())
    table = set(re.findall(r'^ +"([\w:]+)"', TABLE.read_text(), re.MULTILINE)) if TABLE.is_file() else set()
    for function, (file, line) in sorted(public.items()):
        if not has_track_caller(file, line):
            wrong.append(f"{file.relative_to(ROOT)}:{line}: {function} is not `#[track_caller]`")
        if function not in table:
            wrong.append(f"{file.relative_to(ROOT)}:{line}: {function} is not in {TABLE.relative_to(ROOT)}")
    wrong += [f"{TABLE.relative_to(ROOT)}: {name} is no public function that can fail" for name in table - set(public)]
    if wrong:
        sys.exit("\n".join(wrong) + f"\n{len(wrong)} places are wrong, of {len(public)} public functions that can fail")
    print(f"{len(public)} public functions that can fail have their callers' places")


if __name__ == "__main__":
    main()
