#!/usr/bin/env bash
# No line of a source is longer than 120 columns. rustfmt does not wrap comments, so this looks at them too. A column is
# a character, not a byte. Left out: rows of tables in doc comments and web addresses
# (neither can be broken), and lines whose compiler messages name a column (tests/compile_fail).
source "$(dirname "$0")/env.sh"

git ls-files -z --cached --others --exclude-standard -- \
    '*.rs' '*.cu' '*.cuh' '*.py' '*.sh' .ci ':!*tests/compile_fail/*' |
    python3 -c '
import os, re, sys

found = 0
for name in sorted(filter(None, sys.stdin.read().split("\0"))):
    if not os.path.isfile(name):
        continue  # Deleted, and not committed yet.
    with open(name, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            columns = len(line.rstrip("\n"))
            if columns > 120 and not re.match(r"\s*(//[/!]|\*|#) \|.*\|$|\s*(//[/!]?|#) \S*https?://\S+$", line):
                found += 1
                print(f"{name}:{number}: {columns} columns")
if found:
    sys.exit(f"{found} lines are longer than 120 columns")
'
