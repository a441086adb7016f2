#!/usr/bin/env python3
"""Checks the README files and the pages of the book, as they stand in the repository.

A link leads to a file, and to a heading where it has a `#`. Links to rustdoc (`../doc/..` of a page of the first level,
beside the built book) are checked in target/doc, which must be there. A path of the repository in backticks is there.
Lines are at most 120 columns wide, the README is short, and SUMMARY.md has all pages. A page with Rust programs is a
doctest of one crate: its `tests/unit/book.rs` (candle: `src/book.rs`) has it. Those that `.ci/paste.py` compiles need
not be doctests.

`design/all_reduce.md` lists functions with their files. A function that is not in its file any more is a fault.

Tables stand once, and agree with the code: variables, features, examples, modules, and the differences of
`Error::Mismatch`, and the names of events. `cargo test` is not said to run everything.
"""
import pathlib
import re
import sys
import tomllib
import urllib.parse

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCE, RUSTDOC = ROOT / "docs/src", ROOT / "target/doc"
README_LINES, WIDTH = 124, 120
# Written by programs, whose lines are what they are.
GENERATED = {SOURCE / "guide/bug_zoo.md", *SOURCE.glob("guide/bug_zoo/*.md")}

LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\[\]]*\])*\]\(([^()\s]*(?:\([^()\s]*\)[^()\s]*)*)\)")
PATH = re.compile(r"`((?:src|tests|crates|kernels|loom_tests|benches|examples|docs|\.ci)/[\w./-]+)`")


def prose(text):
    """The page without its blocks of code, with all its lines."""
    out, fence = [], None
    for line in text.splitlines():
        mark = re.match(r"\s*(```+|~~~+)", line)
        if mark and fence is None:
            fence = mark[1]
        elif mark and line.strip() == fence:
            fence, line = None, ""
        out.append("" if fence else line)
    return out


def headings(text):
    """The anchors of a page, as GitHub and mdBook make them."""
    found = {}
    for line in prose(text):
        if re.match(r"#{1,6} ", line):
            words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line.lstrip("#").strip()).lower()
            anchor = "".join(c for c in words.replace(" ", "-") if c.isalnum() or c in "-_")
            count = found.get(anchor, -1) + 1
            found[anchor] = count
            if count:
                found[f"{anchor}-{count}"] = 0
    return set(found)


def check_page(page):
    name = page.relative_to(ROOT)
    if match := re.search(r"^cargo test +# *(everything|all(?! but)).*", page.read_text(), re.M):
        yield f"{name}: {match[0]}: not without GPU_POOL_LONG"
    for number, line in enumerate(prose(page.read_text()), 1):
        where = f"{name}:{number}"
        is_prose = page not in GENERATED and "<!--" not in line and not line.lstrip().startswith(("|", "<", "!"))
        if is_prose and len(line) > WIDTH:
            yield f"{where}: {len(line)} columns"
        if re.fullmatch(r"[A-Z_]{4,}", line):
            yield f"{where}: {line} is a placeholder"
        if re.match(r"<!-- (value|ratio|spread) ", line):
            yield f"{where}: a comment at the start of a line ends the paragraph; put it within the sentence"
        for path in PATH.findall(line):
            if not (ROOT / path).exists():
                yield f"{where}: `{path}` is not there"
        for link in LINK.findall(re.sub(r"`[^`]*`", lambda m: "`" + "." * (len(m[0]) - 2) + "`", line)):
            target, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            path = (page.parent / urllib.parse.unquote(target)).resolve() if target else page
            if SOURCE.parent / "doc" in path.parents:
                path = RUSTDOC / path.relative_to(SOURCE.parent / "doc")
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
    files = [file for _, file, _ in calls]
    # Behind `sync` and `Driver::launch` a reader need not look.
    outside = [file for file in files if not re.match(r"src/(sync/|driver/cuda/(?!mod\.rs))", file)]
    for some in files, outside:
        total = f"{len(some)} calls in {len(set(some))} files."
        if total not in page.read_text():
            yield f"{page.relative_to(ROOT)}: the list has {total}"


def has_programs(text):
    """Whether rustdoc compiles a block of the page. It takes a block without a language for Rust, too."""
    marks = re.findall(r"^ *```(.*)$", text, re.MULTILINE)[::2]
    words = [[word.strip() for word in mark.split(",")] for mark in marks]
    compiled = {"", "rust", "no_run", "should_panic", "compile_fail"}
    return any("ignore" not in block and compiled & set(block) for block in words)


RELATIVE = re.compile(r'include_(?:str|bytes)!\("')
PAGE = re.compile(r'^    \w+: "((?:docs/src/[\w/]+|README)\.md)",$', re.M)


PASTED = re.findall(r'"((?:docs/src/[\w/]+|README)\.md)"', (ROOT / ".ci/paste.py").read_text())


def check_programs(pages):
    books = [path for folder in (".", "crates/*") for path in sorted(ROOT.glob(f"{folder}/tests/unit/book.rs"))]
    books.append(ROOT / "crates/candle/src/book.rs")
    included = [path for book in books for path in PAGE.findall(book.read_text())]
    for page in pages:
        name = page.relative_to(ROOT).as_posix()
        count, wanted = included.count(name), int(has_programs(page.read_text()))
        if count != wanted and (count or name not in PASTED):
            yield f"{name} is in {count} of the files {', '.join(str(book.relative_to(ROOT)) for book in books)}"
    # Rustdoc compiles all programs of a crate as one, in a folder of its own. A path that is relative to the page is
    # not found there. Then rustdoc compiles and links them one by one, without a word, which takes minutes.
    doctests = [page for page in pages if page.relative_to(ROOT).as_posix() in included]
    for file in [*doctests, *ROOT.glob("src/**/*.rs"), *ROOT.glob("crates/*/src/**/*.rs")]:
        for number, line in enumerate(file.read_text().splitlines(), 1):
            if RELATIVE.search(line) and (file.suffix == ".md" or line.lstrip().startswith(("///", "//!"))):
                yield f"{file.relative_to(ROOT)}:{number}: use `env!`"


CRATES = {"gpu-pool": ROOT} | {f"gpu-pool-{path.name}": path for path in sorted(ROOT.glob("crates/*"))}
# Variables of the crates' own tests, benches and models.
OWN = {
    "BEFORE", "BENCH_NCCL", "BENCH_NO_PEER", "DDP", "FUZZ_SEED", "FUZZ_STEPS", "HEAP_STEPS", "LONG", "SOAK", "LOOM",
    "MACHINE", "MUTANT", "TEST_PEERS", "TEST_TASK", "TEST_TOO_MANY_HANDLES", "TEST_TRANSPORT", "TORCH",
}
# Features for the crates' own tests.
OWN_FEATURES = {
    ("gpu-pool-candle", "peer"), ("gpu-pool-lab", "cuda"), ("gpu-pool-lab", "blas"), ("gpu-pool-cluster", "extend"),
}


def rows(text, pattern):
    """The cells of each row of the tables whose first cell matches."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in re.sub(r"^\s*//! ?", "", line).strip().strip("|").split("|")]
        if line.lstrip("/! ").startswith("|") and re.match(pattern, cells[0]):
            yield cells


def check_variables(pages):
    """environment.md has every variable that a user may set, and no other page has a table of them."""
    source = (ROOT / "src/builder/environment.rs").read_text()
    known = set(re.findall(r'"(\w+)"', source[source.index("const KNOWN") :].split("];")[0]))
    for page in pages:
        cells = " ".join(cells[0] for cells in rows(page.read_text(), "`GPU_POOL_"))
        found = re.findall(r"GPU_POOL_(\w+)", cells)
        if page.name == "environment.md":
            if sorted(found) != sorted(known - OWN):
                yield f"docs/src/guide/environment.md: {set(found) ^ (known - OWN)}: the code has other variables"
        elif found:
            yield f"{page.relative_to(ROOT)}: the table of variables is guide/environment.md"


def check_features():
    """install.md, the front page of rustdoc and each crate's README have the features of Cargo.toml, with defaults."""
    real = set()
    for crate, folder in CRATES.items():
        features = tomllib.loads((folder / "Cargo.toml").read_text())["features"]
        real |= {(crate, name, name in features["default"]) for name in features if name != "default"}
    real = {feature for feature in real if feature[:2] not in OWN_FEATURES}
    told, crates = set(), []
    text = (SOURCE / "guide/install.md").read_text()
    for first, name, default, *_ in (cells for cells in rows(text, r"`gpu-pool|all but|$") if len(cells) == 4):
        named = re.findall(r"`([\w-]+)`", first)
        crates = [crate for crate in CRATES if crate not in named] if first.startswith("all but") else named or crates
        told |= {(crate, name.strip("`"), default == "yes") for crate in crates}
    if told != real:
        yield f"docs/src/guide/install.md: features {sorted(told ^ real)} are not those of Cargo.toml"
    front = (ROOT / "src/lib.rs").read_text().split("//! # Features")[1].split("//! GPUs need")[0]
    told = {("gpu-pool", cells[0].strip("`"), cells[1] == "yes") for cells in rows(front, "`")}
    if told != {feature for feature in real if feature[0] == "gpu-pool"}:
        yield "src/lib.rs: its features are not those of Cargo.toml"
    for crate, folder in [*CRATES.items()][1:]:
        table = rows((folder / "README.md").read_text(), "`")
        told = {(crate, cells[0].strip("`"), cells[1] == "yes") for cells in table}
        if told != {feature for feature in real if feature[0] == crate}:
            yield f"{crate}: the features in its README are not those of Cargo.toml"


def check_reference():
    """reference.md has every example, and every public module of the crates."""
    text = (SOURCE / "reference.md").read_text()
    for crate, folder in CRATES.items():
        for example in tomllib.loads((folder / "Cargo.toml").read_text()).get("example", []):
            if f"`{example['name']}`" not in text:
                yield f"docs/src/reference.md has no example `{example['name']}`"
        if folder.name == "candle":  # It is outside of the workspace, so its pages are not among these.
            continue
        crate = crate.replace("-", "_")
        for page in re.findall(r'class="mod" href="([\w/]+\.html)"', (RUSTDOC / crate / "index.html").read_text()):
            if f"(../doc/{crate}/{page})" not in text:
                yield f"docs/src/reference.md has no link to {crate}/{page}"


def check_differences():
    """The documentation of `Error::Mismatch` has each difference that the code finds."""
    told = re.search(r" Mismatch \{\n(.*?)\n +what:", (ROOT / "src/error.rs").read_text(), re.S)[1]
    code = [path.read_text() for folder in ("collective", "gradients") for path in ROOT.glob(f"src/{folder}/**/*.rs")]
    found = set(re.findall(r'(?:\bboth\(|\.differs\(|\bwhat: )"([\w ]+)"', "\n".join(code)))
    for body in re.findall(r"fn differs\w*\(.*?\n    \}\n", (ROOT / "src/fabric/call.rs").read_text(), re.S):
        found |= set(re.findall(r'"([\w ]+)"', body))
    told = set(re.findall(r'"([\w ]+)"', told))
    if found != told:
        yield f"src/error.rs: `Mismatch::what` differs from the code in {sorted(found ^ told)}"


def check_modules():
    """`Module::cuda` and `Module::ptx` stand next to each other, and the feature of the first one is named."""
    page = (RUSTDOC / "gpu_pool/struct.Module.html").read_text()
    methods = re.findall(r'<section id="method\.(\w+)"', page)
    ptx = methods.index("ptx")
    if "cuda" not in methods[max(0, ptx - 1) : ptx + 2]:
        yield f"rustdoc of Module: {methods}: `cuda` is not next to `ptx`"
    if "nvrtc" not in page.split('id="method.cuda"')[1].split("<section")[0]:
        yield "rustdoc of Module: `cuda` does not name its feature"


def check_debug():
    """Each public type has `Debug`. (The compiler's lint `missing_debug_implementations` asks private ones, too.)"""
    for page in sorted(RUSTDOC.glob("gpu_pool*/**/*.html")):
        text = page.read_text() if page.name.startswith(("struct.", "enum.", "union.")) else "impl-Debug-for-"
        if "impl-Debug-for-" not in text and 'http-equiv="refresh"' not in text:
            yield f"{page.relative_to(RUSTDOC)}: no `Debug`"


def check_house():
    """The table of design/house.md has the rooms of the runtime, from the top to the bottom."""
    crate = (ROOT / ".ci/rooms.txt").read_text().split("\ncrate ")[1]
    floor = {room: at for at, line in enumerate(crate.splitlines()[1:]) for room in re.findall(r"\w+", line)}
    text = (SOURCE / "design/house.md").read_text()
    told = [room for cells in rows(text, "`") for room in re.findall(r"`(\w+)`", cells[0]) if len(cells) == 2]
    wrong = [a for a, b in zip(told, told[1:]) if floor.get(a, 99) > floor.get(b, 99)]
    if missing := [room for room in floor if floor[room] <= floor["sync"] and room not in told] + wrong:
        yield f"docs/src/design/house.md: missing or in another order than in .ci/rooms.txt: {missing}"


def check_tests():
    """The tests that design/tests.md names are there."""
    for file, name in re.findall(r"`([\w/]+\.rs)`: `(\w+)`", (SOURCE / "design/tests.md").read_text()):
        if not re.search(rf"\bfn {name}\b", (ROOT / file).read_text() if (ROOT / file).exists() else ""):
            yield f"docs/src/design/tests.md: no test {file}::{name}"


def check_events():
    """logging.md has the names of all events, by level."""
    text = (SOURCE / "guide/logging.md").read_text()
    listed = re.findall(r"^- `(\w+)`: (.*?)(?=\n- |\n\n)", text, re.S | re.M)
    told = {(level, name) for level, names in listed for name in re.findall(r"`gpu_pool\.(\w+)`", names)}
    files = [*ROOT.glob("src/**/*.rs"), *ROOT.glob("crates/*/src/**/*.rs")]
    code = "\n".join(path.read_text() for path in files if path != ROOT / "src/log.rs")
    if told != (found := set(re.findall(r'event!\(\s*(\w+),\s*"(\w+)"', code))):
        yield f"docs/src/guide/logging.md: the events differ from the code's in {sorted(told ^ found)}"


def main():
    pages = [ROOT / "README.md", *sorted(SOURCE.rglob("*.md"))]
    around = [ROOT / "CONTRIBUTING.md", ROOT / "NOTICE.md", *sorted(ROOT.glob("crates/*/README.md"))]
    faults = [fault for page in pages + around for fault in check_page(page)]
    faults += [*check_calls(), *check_programs(pages)]
    faults += [*check_variables(pages + around), *check_features(), *check_reference(), *check_differences()]
    faults += [*check_modules(), *check_debug(), *check_house(), *check_tests(), *check_events()]
    lines = len((ROOT / "README.md").read_text().splitlines())
    if lines > README_LINES:
        faults.append(f"README.md has {lines} lines; {README_LINES} are a page that people read")
    summary = (SOURCE / "SUMMARY.md").read_text()
    for page in pages[1:]:
        name = page.relative_to(SOURCE).as_posix()
        if name != "SUMMARY.md" and f"({name})" not in summary:
            faults.append(f"docs/src/{name} is not in SUMMARY.md")
    if faults:
        sys.exit("\n".join(faults))
    print(f"{len(pages + around)} pages: links, paths, headings and widths are right")


if __name__ == "__main__":
    main()
