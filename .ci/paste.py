#!/usr/bin/env python3
"""Pastes programs of Markdown pages into fresh crates, as a reader would, and runs them.

Usage: .ci/paste.py [PAGE..]; without names, all of PAGES. A crate is made by `cargo new`, and gets the dependencies of
the last TOML block above the program. Only the words `../gpu-pool` of a path become this checkout. A program is a whole
file: with `fn main`, or with tests, which go to `tests/`. Nothing in it is hidden from readers on the web. The page may
mark a program `no_run`, because it needs a GPU or another process: it is compiled.

EXAMPLE is a package outside of the workspace: `cargo run` and `cargo test` in its folder. Its page shows parts of its
files, each below a line with the file's name.

Crates get this workspace's lock file, so that nothing has to be fetched. Software GPUs run the programs.
"""
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
# `docs/check.py` reads this list, too: a page of it need not be a doctest.
PAGES = [
    "README.md",
    "crates/train/README.md",
    "crates/cluster/README.md",
    "crates/lab/README.md",
    "docs/src/introduction.md",
    "docs/src/guide/install.md",
    "docs/src/guide/first_program.md",
    "docs/src/guide/kernels.md",
    "docs/src/guide/logging.md",
]
EXAMPLE, EXAMPLE_PAGE = ROOT / "examples/own_kernel", "docs/src/guide/own_kernel.md"
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.M | re.S)


PART = re.compile(r"^`([\w/.]+)`:\n\n```\w+\n(.*?)^```$", re.M | re.S)


def programs(page):
    """Line, marks, source and dependencies of each program of a page."""
    text, dependencies = (ROOT / page).read_text(), None
    for block in BLOCK.finditer(text):
        language, marks, source = block.groups()
        line = text.count("\n", 0, block.start()) + 1
        if language == "toml" and "[dependencies]" in source:
            dependencies = source.replace("../gpu-pool", str(ROOT))
        elif language == "rust":
            marks = set(filter(None, re.split(r"[,\s]+", marks)))
            is_whole = "#[test]" in source or re.search(r"^fn main\(\) -> .*Result<", source, re.M)
            if marks - {"no_run"} or not is_whole or re.search(r"^\s*# ", source, re.M):
                sys.exit(f"{page}:{line}: not a whole file that a reader can paste")
            if dependencies is None:
                sys.exit(f"{page}:{line}: no block above it has [dependencies]")
            yield line, marks, source, dependencies


def cargo(crate, *arguments):
    run = lambda *how: subprocess.run(
        ["cargo", *arguments, "--quiet", *how], cwd=crate, text=True, capture_output=True, timeout=1200
    )
    done = run("--offline")
    # Only where crates are missing: what is wrong with the program stays wrong.
    if done.returncode and "--offline" in done.stderr:
        done = run()
    return done


def paste(crate, marks, source, dependencies):
    manifest = (crate / "Cargo.toml").read_text().partition("[dependencies]")[0]
    (crate / "Cargo.toml").write_text(manifest + dependencies)
    shutil.copy(ROOT / "Cargo.lock", crate)
    if "#[test]" in source:
        marks.clear()  # For rustdoc, which would not run the test.
        (crate / "src/main.rs").write_text("fn main() {}\n")
        (crate / "tests").mkdir(exist_ok=True)
        (crate / "tests/pasted.rs").write_text(source)
        return cargo(crate, "test", "--test", "pasted")
    (crate / "src/main.rs").write_text(source)
    return cargo(crate, "build" if "no_run" in marks else "run")


def example():
    """Runs and tests the example; what its page shows stands in its files."""
    parts = PART.findall((ROOT / EXAMPLE_PAGE).read_text())
    others = [name for name, part in parts if part not in (ROOT / name).read_text()]
    if others or not parts:
        sys.exit(f"{EXAMPLE_PAGE} does not show what stands in {' '.join(others) or 'any file'}")
    shutil.copy(ROOT / "Cargo.lock", EXAMPLE)
    for command in "run", "test":
        yield command, cargo(EXAMPLE, command)


def main():
    os.environ["GPU_POOL_BACKEND"] = "host:2"
    failed = count = 0

    def report(name, start, done, verdict="ok"):
        nonlocal failed, count
        count, failed = count + 1, failed + bool(done.returncode)
        print(f"{name}: {'FAILED' if done.returncode else verdict}, {time.monotonic() - start:.0f} s", flush=True)
        if done.returncode:
            print(done.stdout, done.stderr, sep="\n", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        crate = pathlib.Path(folder) / "pasted"
        subprocess.run(["cargo", "new", "--quiet", "--vcs", "none", crate], check=True)
        for page in sys.argv[1:] or PAGES:
            for line, marks, *program in programs(page):
                start = time.monotonic()
                done = paste(crate, marks, *program)
                report(f"{page}:{line}", start, done, "compiles" if marks else "ok")
    if not sys.argv[1:]:
        start = time.monotonic()
        for command, done in example():
            report(f"{EXAMPLE.name}: cargo {command}", start, done)
            start = time.monotonic()
    if failed or not count:
        sys.exit(f"{failed} of {count} pasted programs failed")


main()
