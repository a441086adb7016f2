#!/usr/bin/env python3
"""Each public function that can fail says where it was called.

Usage: .ci/places.py, after `cargo doc --workspace`. For each crate it checks:

* No closure has `Location::caller()`: there it is the library's own line, since `#[track_caller]` does not reach into
  closures. The same holds for the other functions that take the caller's place, unless the function around the closure
  has entered its operation before (`OpSite::here`), whose place goes before.
* Each public function with the crate's `Result` is `#[track_caller]`, and so is each function that takes the caller's
  place. Methods of traits count for the types that have them: `Device::relu`.
* A `places.rs` of some crate's tests calls each of them wrongly, or says why it does not.

The public functions are those on rustdoc's pages. So none is forgotten, whatever macro has made it.
"""

import html
import pathlib
import re
import sys

sys.dont_write_bytecode = True
from source import code, ends, only_tests

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Not `crates/candle`: it is outside of the workspace, and most of its calls come from closures of candle's.
ABOVE = [path for path in sorted((ROOT / "crates").iterdir()) if path.name != "candle"]
CRATES = {"gpu_pool": ROOT} | {f"gpu_pool_{path.name}": path for path in ABOVE}
# Functions that take the place of their caller.
TAKES_PLACE = re.compile(
    r"\b(Location::caller|OpSite::(?:here|place)|Error::(?:invalid|wrong_pool|wrong_device|borrowed)|Call::new)\("
)
DRIVERS = {"driver", "check", "faulty"}
EXTENDED = {"Device", "DeviceBuffer", "Group", "GpuPool", "Builder"}
METHOD = re.compile(
    r'<section id="(?:method|tymethod)\.(\w+)" class="method">(.*?)<h4 class="code-header">(.*?)</h4>', re.DOTALL
)
FUNCTION = re.compile(r'<pre class="rust item-decl"><code>(.*?)</code></pre>', re.DOTALL)
SOURCE = re.compile(r'class="src[^"]*" href="[./]*src/(\w+)/([^"#]+)\.html#(\d+)')
CLOSURE = re.compile(r"(?:[(,=\[{;&!]|\|\||\breturn|\belse|\bmove)\s*(\|(?:\|)?)")


def can_fail(signature):
    """Whether a declaration returns the crate's result. Arguments are left out: a closure may return one, too."""
    signature = signature.split('<div class="where">')[0]
    signature = re.sub(r'<a [^>]*"type gpu_pool::error::Result"', r"Our\g<0>", signature)
    plain = html.unescape(re.sub(r"<[^>]+>", "", signature)).replace("->", "=>")
    closing, depth = ends(plain), 0
    for at in range(re.search(r"\bfn \w+", plain).end(), len(plain)):
        if plain[at] == "(" and depth == 0:
            return plain[closing[at] + 1 :].lstrip().startswith("=> OurResult<")
        depth += (plain[at] == "<") - (plain[at] == ">" and plain[at - 1] != "=")
    return False


def public_functions(folder):
    """`Type::name` or `name` of each public function that can fail: its file and line."""
    for path, kind, name in re.findall(r'href="((?:\w+/)*(\w+)\.(\w+)\.html)"', (folder / "all.html").read_text()):
        text = (folder / path).read_text()
        if kind == "fn":
            declarations = [(name, text, FUNCTION.search(text)[1])]
        elif kind in ("struct", "enum", "union", "trait"):
            # Of traits those of the crates above that give the runtime's types further methods.
            types = [name]
            if kind == "trait":
                types = EXTENDED.intersection(re.findall(rf'id="impl-{name}-for-(\w+)', text))
                types = types if folder.name != "gpu_pool" else ()
            # Impls of the standard library's and of other crates' traits return other results.
            own = METHOD.findall(text.split('id="deref-methods-')[0])
            declarations = [(f"{on}::{method}", *rest) for on in types for method, *rest in own]
        else:
            continue
        for function, link, signature in declarations:
            if can_fail(signature) and (source := SOURCE.search(link)):
                yield function, CRATES[source[1]] / "src" / source[2], int(source[3])


def has_track_caller(file, line):
    """Whether the attributes above a line say `#[track_caller]`."""
    lines = file.read_text().splitlines()
    if re.match(r" *\w+! *[{(]", lines[line - 1]):  # The macro has the attributes, and the test the calls.
        return True
    for above in map(str.strip, reversed(lines[: line - 1])):
        if above == "#[track_caller]":
            return True
        if not above.startswith(("#[", "//", "#![")):
            return False


def functions(text, closing):
    """Each function with a body: whether it is `#[track_caller]`, and where the body begins and ends."""
    stamped = [(m.end(), closing[m.end() - 1]) for m in re.finditer(r"\bcollectives!\s*\{", text)]
    for match in re.finditer(r"\bfn\s+[\w$]+", text):
        at = match.end()
        while at < len(text) and text[at] not in "{;}":
            at = closing.get(at, at) + 1
        if text[at : at + 1] == "{":
            before = text[max(map(text.rfind, ";{}", [0] * 3, [match.start()] * 3)) + 1 : match.start()]
            # The macro `collectives!` adds the attribute.
            tracks = "#[track_caller]" in before or any(start < at < end for start, end in stamped)
            yield at, closing[at], tracks


def closures(text, closing):
    """Where the body of each closure begins and ends."""
    for match in CLOSURE.finditer(text):
        at = match.end(1)
        if match[1] == "|":
            while at < len(text) and text[at] != "|":
                at = closing.get(at, at) + 1
            at += 1
        start = at = at + len(text[at:]) - len(text[at:].lstrip())
        while at < len(text) and text[at] not in ",;)]}":
            at = closing.get(at, at) + 1
            if text[start] == "{" and at - 1 == closing[start]:
                break
        yield start, at


def within(spans, at):
    """The innermost span around a place."""
    return max((span for span in spans if span[0] < at < span[1]), default=None)


def check_source(file):
    text = code(file.read_text())
    closing = ends(text)
    inner, around = list(closures(text, closing)), list(functions(text, closing))
    taking = []
    for match in TAKES_PLACE.finditer(text):
        function, closure = within(around, match.start()), within(inner, match.start())
        if function:
            taking.append((match, function, closure is not None and closure[0] > function[0]))
    entering = {function for match, function, closed in taking if match[1] == "OpSite::here" and not closed}
    for match, function, closed in taking:
        where = f"{file.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}: {match[1]}"
        if closed and (match[1] == "OpSite::here" or function not in entering):
            yield f"{where} in a closure, which is no `#[track_caller]`"
        elif not closed and not function[2]:
            yield f"{where} in a function without `#[track_caller]`"


def check_sources(folder):
    tests = only_tests(folder / "src")
    for file in sorted((folder / "src").rglob("*.rs")):
        # No call of a user's is in a driver or a layer over one; a `Call` there is one of the driver.
        if file not in tests and "tests" not in file.stem and file.relative_to(folder).parts[1] not in DRIVERS:
            yield from check_source(file)


def check_public(public, folders):
    """Each function is stamped, and a table of the tests of some crate has it."""
    tables = [table for folder in folders for table in sorted((folder / "tests").glob("*/places.rs"))]
    text = "".join(table.read_text() for table in tables)
    excepted = set(re.findall(r'^ +\("([\w:]+)", "', text, re.MULTILINE))
    called = set(re.findall(r'told\(\s*"([\w:]+)"', text))
    called |= {f"{on}::{name}" for name in re.findall(r"both!\(\w+, (\w+)", text) for on in ("Device", "Group")}
    yield from (f"{name} is called, and excepted" for name in sorted(called & excepted))
    for function, (file, line) in sorted(public.items()):
        place = f"{file.relative_to(ROOT)}:{line}: {function}"
        if function not in excepted and not has_track_caller(file, line):
            yield f"{place} is not `#[track_caller]`"
        if function not in called | excepted:
            yield f"{place} is in no places.rs"
    for name in sorted((called | excepted) - set(public)):
        yield f"a places.rs has {name}, which is no public function that can fail"


def main():
    wrong, public = [], {}
    for crate, folder in CRATES.items():
        pages = ROOT / "target/doc" / crate
        if not (pages / "all.html").is_file():
            sys.exit(f"{pages} has no list of all items: run cargo doc first")
        wrong += check_sources(folder)
        public |= {function: place for function, *place in public_functions(pages)}
    wrong += check_public(public, CRATES.values())
    if wrong:
        sys.exit("\n".join(wrong) + f"\n{len(wrong)} places are wrong, of {len(public)} public functions that can fail")
    print(f"{len(public)} public functions that can fail have their callers' places")


if __name__ == "__main__":
    main()
