#!/usr/bin/env python3
"""Each crate is a house: a room, which is a module at the top, uses only rooms below its own.

    .ci/rooms.py           the `use` lines and paths that go up; fails if there are any
    .ci/rooms.py --uses    also which room uses which

`rooms.txt` names the rooms of each crate, from the top to the bottom. The compiler keeps the rest: no crate uses
private parts of another one, and no circle of crates builds. Seen are `crate::..` and `super::..`, in `use` and
elsewhere, but for tests. A public module also shows names of other rooms (`pub use`): that is no use, and such a name
counts for the room that it comes from, like one of the crate's root. Methods are not seen: a room may give a type of a
lower one further methods.
"""

import pathlib
import re
import sys
from collections import defaultdict

sys.dont_write_bytecode = True
from source import code, ends, only_tests

ROOT = pathlib.Path(__file__).resolve().parent.parent


def table():
    """The floor and the room of each module, by the folder of the crate."""
    floors, crate = {}, None
    for line in (ROOT / ".ci/rooms.txt").read_text().splitlines():
        words = line.split("#")[0].split()
        if words[:1] == ["crate"]:
            crate, floor = floors.setdefault(words[1], {}), 0
        elif words:
            floor += 1
            for room in words:
                modules = room.split("+")
                crate.update(dict.fromkeys(modules, (floor, modules[0])))
    return floors


def leaves(tree, closing, start, end, prefix=()):
    """The paths of a `use` tree: `a::{b, c::d as e}`, each as its words and its place."""
    at, path, where = start, list(prefix), start
    while at <= end:
        if at == end or tree[at] == ",":
            if len(path) > len(prefix):
                yield path, where
            path = list(prefix)
        elif tree[at] == "{":
            yield from leaves(tree, closing, at + 1, closing[at], tuple(path))
            at, path = closing[at], list(prefix)
        elif match := re.compile(r"(?:as\s+)?(?:r#)?\w+|\*").match(tree, at):
            where = at if len(path) == len(prefix) else where
            if not match[0].startswith("as "):
                path.append(match[0])
            at = match.end() - 1
        at += 1


def paths(text):
    """Each path that starts at this crate or a module above, and its place."""
    closing = ends(text)
    trees = [(m.end(), text.index(";", m.end())) for m in re.finditer(r"\buse\s", text)]
    for start, end in trees:
        yield from leaves(text, closing, start, end)
    for match in re.finditer(r"(?<![\w$:])(?:crate|super)(?:::\w+)+", text):
        if not any(start <= match.start() < end for start, end in trees):
            yield match[0].split("::"), match.start()


SHOWN = re.compile(r"^pub(?:\(crate\))? use\s", re.MULTILINE)


def shown(file):
    """The names that a module shows of other rooms, and the room that each comes from."""
    text = code(file.read_text())
    found = {}
    for match in SHOWN.finditer(text):
        for path, _ in leaves(text, ends(text), match.end(), text.index(";", match.end())):
            inside = path[0] in ("crate", "self", "super")
            if path[0] == "crate" or file.name == "lib.rs":
                found[path[-1]] = path[inside]
    return found


def check(crate, floors, show):
    source = ROOT / crate / "src"
    roots = {path.stem: path for path in source.glob("*.rs")}
    roots |= {path.parent.name: path for path in source.glob("*/mod.rs")}
    names = {room: shown(path) for room, path in roots.items()}
    tests = only_tests(source)
    uses = defaultdict(lambda: defaultdict(int))
    for file in sorted(source.rglob("*.rs")):
        module = [*file.relative_to(source).parent.parts, *([] if file.stem in ("mod", "lib") else [file.stem])]
        if not module or file in tests or any(part.endswith("tests") for part in module):
            continue
        if module[0] not in floors:
            yield f"{file.relative_to(ROOT)}: the room {module[0]} is not in .ci/rooms.txt"
            continue
        text = code(file.read_text())
        if file == roots.get(module[0]):
            text = re.sub(r"^pub use\s[^;]*;", lambda match: re.sub(r"\S", " ", match[0]), text, flags=re.MULTILINE)
        for path, at in paths(text):
            up = len([word for word in path if word == "super"])
            if path[0] == "crate" or up >= len(module):  # A module within the file has one `super` more.
                name, inner, *_ = [*path[max(up, 1) :], "*", "*"]
                target = names["lib"].get(name, name)
                target = names.get(target, {}).get(inner, target)
                if target in floors and floors[target] != floors[module[0]]:
                    (lower, room), (floor, user) = floors[target], floors[module[0]]
                    uses[floor, user][lower, room] += 1
                    if lower <= floor:
                        line = text.count("\n", 0, at) + 1
                        yield f"{file.relative_to(ROOT)}:{line}: {user} uses {room}: {'::'.join(path)}"
    for module in floors:
        if not (source / module).is_dir() and not (source / f"{module}.rs").is_file():
            yield f".ci/rooms.txt: {crate} has no room {module}"
    for user in sorted(uses) if show else ():
        print(f"{user[1]}: " + ", ".join(f"{room} {count}" for (_, room), count in sorted(uses[user].items())))


def main():
    wrong = [fault for crate, floors in table().items() for fault in check(crate, floors, "--uses" in sys.argv)]
    if wrong:
        sys.exit("\n".join(wrong) + f"\n{len(wrong)} arrows between rooms go up")
    print("No arrow between rooms goes up")


if __name__ == "__main__":
    main()
