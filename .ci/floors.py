#!/usr/bin/env python3
"""Checks the floors of the crate: no room uses a room of a higher floor, and no two rooms use each other.

    .ci/floors.py              every arrow that runs up, every circle between rooms, and counts; fails if there are any
    .ci/floors.py --summary    only the counts
    .ci/floors.py --rooms      which room uses which, and how many items
    .ci/floors.py --circles    also: circles between files, as information
    .ci/floors.py --root DIR   the tree to check; --table FILE: another table of rooms

The table `floors.txt` names the rooms. An arrow is one item that one file uses: through `use`, through a path in the
code, or through a call of an inherent method. A re-export is a use of the item; a user of the re-export uses the file
that defines the item. Comments, attributes and test code (`cfg(test)`, `cfg(doctest)`) are not looked at.

A call of a method needs the type of its receiver. The script knows the types of parameters, fields, results of methods,
and of `let` where these suffice. If the type is unknown, the receiver's name decides (`dev`, `group`, `pool`,
`builder`), or else the method's name, if no other type has such a method. The script does not see calls through
generics, names that a macro puts together, and calls on a receiver with neither a known type nor a telling name.

`rust/` reads the sources: tokens, then items and names, then what each file uses.
"""

import argparse
import sys
from collections import defaultdict
from pathlib import Path

sys.dont_write_bytecode = True
from rust.items import Crate
from rust.walk import Walk
from rust.words import TOKENS


class Table:
    """Rooms, their floors and their places."""

    def __init__(self, file):
        self.floor, self.places, self.crates = {}, [], []
        floor = 0
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            words = line.split("#")[0].split()
            if not words:
                continue
            if words[0] == "crate":
                self.crates.append((words[1], words[2]))
                continue
            beside = words[0] == "+"
            room, *places = words[beside:]
            if room not in self.floor:
                floor += not beside
                self.floor[room] = floor
            for place in places:
                if any(place == other for other, _ in self.places):
                    raise SystemExit(f"{file}:{number}: {place} stands there twice")
                self.places.append((place, room))

    @staticmethod
    def fits(place, file):
        return file in (place, place + ".rs") or file.startswith(place.rstrip("/") + "/")

    def room(self, file):
        if any(file == root for _, root in self.crates):
            return None  # It only re-exports.
        fitting = [(len(place), room) for place, room in self.places if self.fits(place, file)]
        if not fitting:
            raise SystemExit(f"floors: {file} is in no room; give it a line in the table")
        return max(fitting)[1]


def circles(graph):
    """The strongly connected components of more than one node, the largest first (Tarjan, without recursion)."""
    index, low, on_stack, stack, out = {}, {}, set(), [], []
    for start in sorted(graph):
        if start in index:
            continue
        work = [(start, iter(sorted(graph.get(start, ()))))]
        index[start] = low[start] = len(index)
        stack.append(start)
        on_stack.add(start)
        while work:
            node, following = work[-1]
            for target in following:
                if target not in index:
                    index[target] = low[target] = len(index)
                    stack.append(target)
                    on_stack.add(target)
                    work.append((target, iter(sorted(graph.get(target, ())))))
                    break
                if target in on_stack:
                    low[node] = min(low[node], index[target])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    component = []
                    while not component or component[-1] != node:
                        component.append(stack.pop())
                        on_stack.discard(component[-1])
                    if len(component) > 1:
                        out.append(sorted(component))
    return sorted(out, key=lambda component: (-len(component), component))


class Use:
    """One item that one file uses."""

    def __init__(self, source, item, target):
        self.source, self.item, self.target = source, item, target
        self.lines, self.kinds = [], set()
        self.owner = None  # of a method: its type


class Report:
    def __init__(self, root, table):
        self.table = table
        self.crate = crate = Crate(root, table.crates)
        self.rooms = {file: table.room(file) for file in crate.files}
        self.uses, self.lost = {}, []
        modules = list(all_modules(crate.roots.values()))
        types = {item for module in modules for item in module.items.values() if item.methods}
        # Types with methods in more than one room, and who else has a method of the same name.
        tokens = {crate.lookup(top, name).item for top in crate.roots.values() for name in TOKENS.values()}
        crate.spread = {t for t in types if len({self.rooms[m.file] for ms in t.methods.values() for m in ms}) > 1}
        crate.spread |= tokens - {None}
        crate.owners = defaultdict(set)
        for owner in types:
            for name in owner.methods:
                crate.owners[name].add(owner)
        for module in modules:
            for item in module.items.values():
                if item.kind == "trait":
                    for at, token in enumerate(item.body[:-1]):
                        if token.text == "fn":
                            crate.owners[item.body[at + 1].text].add(item)
        for module in crate.files.values():
            walk = Walk(crate, module, self.note)
            self.re_exports = []
            walk.run()
            self.lost += [(module.file, *lost) for lost in walk.lost]
            for line, item, file, name in self.re_exports:
                # A re-export is a use by this file only if the name is used here too.
                use = self.add(module.file, line, item, file)
                use.kinds.add("use" if name in walk.used else "re-export")
        self.join_calls()

    def note(self, source, line, item, target, kind, name=None, owner=None):
        if source == target:
            return
        if kind == "re-export":
            self.re_exports.append((line, item, target, name))
            return
        use = self.add(source, line, item, target)
        use.kinds.add(kind)
        use.owner = owner

    def add(self, source, line, item, target):
        use = self.uses.setdefault((source, item, target), Use(source, item, target))
        if line not in use.lines:
            use.lines.append(line)
        return use

    def join_calls(self):
        """Calls of a type's methods belong to the use of the type, where that is in the same two files."""
        for key, use in list(self.uses.items()):
            if use.owner and (named := self.uses.get((use.source, str(use.owner), use.target))):
                named.lines += [line for line in use.lines if line not in named.lines]
                named.kinds |= use.kinds
                del self.uses[key]

    def between_rooms(self):
        """Uses between two rooms, without crate roots."""
        for use in self.uses.values():
            source, target = self.rooms.get(use.source), self.rooms.get(use.target)
            if source and target and source != target:
                yield use, source, target

    def up(self):
        floor = self.table.floor
        arrows = [a for a in self.between_rooms() if floor[a[2]] < floor[a[1]]]
        return sorted(arrows, key=lambda a: (floor[a[1]], a[1], a[0].source, min(a[0].lines), a[0].item))

    def room_graph(self):
        graph = defaultdict(lambda: defaultdict(list))
        for use, source, target in self.between_rooms():
            graph[source][target].append(use)
        return graph

    def file_graph(self, calls):
        graph = defaultdict(set)
        for use in self.uses.values():
            kinds = use.kinds - {"re-export"} - (set() if calls else {"call"})
            if kinds and self.rooms.get(use.source) and self.rooms.get(use.target):
                graph[use.source].add(use.target)
        return graph


def all_modules(modules):
    for module in modules:
        yield module
        yield from all_modules(module.modules.values())


def show(use, source, target):
    lines = sorted(use.lines)
    more = "".join(f" :{line}" for line in lines[1:6]) + (" .." if len(lines) > 6 else "")
    also = f"  also{more}" if more else ""
    return f"{use.source}:{lines[0]}  {source} -> {target}  {use.item} ({use.target}){also}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(__file__).resolve().parent
    parser.add_argument("--root", type=Path, default=here.parent)
    parser.add_argument("--table", type=Path, default=here / "floors.txt")
    parser.add_argument("--summary", action="store_true", help="only the counts")
    parser.add_argument("--rooms", action="store_true", help="which room uses which")
    parser.add_argument("--circles", action="store_true", help="circles between files, as information")
    options = parser.parse_args()

    table = Table(options.table)
    report = Report(options.root, table)
    up, graph = report.up(), report.room_graph()
    room_circles = circles(graph)
    if not options.summary:
        for arrow in up:
            print(show(*arrow))
        for circle in room_circles:
            print(f"circle of {len(circle)} rooms: {', '.join(sorted(circle, key=lambda r: (table.floor[r], r)))}")
            for source in circle:
                for target in sorted(set(graph[source]) & set(circle)):
                    if table.floor[target] <= table.floor[source]:
                        print("    " + show(graph[source][target][0], source, target))
    if options.rooms:
        for room in sorted(table.floor, key=lambda r: (table.floor[r], r)):
            targets = sorted(graph.get(room, ()), key=lambda r: (table.floor[r], r))
            uses = ", ".join(
                f"{'^' if table.floor[t] < table.floor[room] else ''}{t} {len(graph[room][t])}" for t in targets
            )
            files = sum(r == room for r in report.rooms.values())
            print(f"{room} ({files} files): {uses or '-'}")
        for place, room in table.places:
            if not any(table.fits(place, file) for file in report.rooms):
                print(f"no file yet: {place} ({room})")
    if options.circles:
        for calls, what in ((False, "without calls of methods"), (True, "with calls of methods")):
            found = circles(report.file_graph(calls))
            sizes = ", ".join(str(len(circle)) for circle in found) or "none"
            print(f"circles of files, {what}: {len(found)}, of {sizes} files")
            for circle in [] if options.summary else found:
                print(f"    {len(circle)}: {' '.join(file.removeprefix('src/') for file in circle)}")
    for file, line, path in report.lost:
        print(f"{file}:{line}: cannot follow {path}")
    pairs = len({(use.source, use.target) for use, _, _ in up})
    calls = sum(use.kinds == {"call"} for use, _, _ in up)
    print(
        f"floors: {len(report.rooms)} files in {len(set(report.rooms.values()) - {None})} rooms; "
        f"{len(up)} arrows up ({calls} of them calls of methods; {pairs} pairs of files, "
        f"{len({(s, t) for _, s, t in up})} pairs of rooms); {len(room_circles)} circles of rooms"
    )
    return 1 if up or room_circles or report.lost else 0


if __name__ == "__main__":
    sys.exit(main())
