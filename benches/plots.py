"""Draws the plots of `tables.py` as SVG, with the standard library only.

`dots`: a line for each comparison, with a dot for each case at the ratio of the peer's time to ours. `curves`: that
ratio against the size, with a curve for each number of devices. `sweep`: times and bandwidths of all sides against the
size.
"""
import math
import re

FONT = 'font-family="sans-serif"'
# Paul Tol's "bright" scheme: readable with any kind of colour vision.
COLOURS = ["#4477aa", "#ee6677", "#228833", "#aa3377", "#ccbb44"]


def against(peers, prefix, cases):
    """Lines of a plot: for each case, "words: pattern", a line against each peer."""
    pairs = [case.split(": ") for case in cases]
    return [(words + suffix, prefix + pattern, peer) for words, pattern in pairs for peer, suffix in peers.items()]


def also(*peers):
    """Peers that the words of a line name."""
    return {peer: f", against {peer}" for peer in peers}


# By bench: the heading, and the lines: words, the pattern of the cases, and the beginning of the peer's name.
LINES = {
    "scope": ("A scope: times as fast as others", [
        (f"{peer}, threads {state}", cases, peer.split()[0])
        for peer in ("rayon broadcast", "crossbeam spawn")
        for state, cases in (("awake", r"\w+/\d+"), ("asleep", r".*/idle_300us"))
    ]),
    "launch": ("Calls of threads: times as fast as others", [
        *against(also("processes"), "gpu/", [
            r"launch: launch/\d", r"launch (raw): launch_raw/\d", r"launch and wait: launch_synchronise/\d",
            r"copy of 4 KB: copy_4K/\d", r"record and wait: record_wait/\d",
        ]),
        *against(also("processes", "cuMemAllocAsync"), "gpu/", [r"allocate and free: allocate_free/\d"]),
    ]),
    "copy": ("Copies: times as fast as the driver's", [
        *against({"driver": ""}, "gpu/", [
            "pageable memory, up: pageable_up/.*", "pageable memory, down: pageable_down/.*",
            "pinned memory, up: pinned_up/.*", "pinned memory, down: pinned_down/.*", "between GPUs, direct: peer/.*",
        ]),
        ("between GPUs, staged through the host", r"gpu/staged/.*", "pinned"),
    ]),
    "data_parallel": ("A forward pass: times as fast as torch's", [
        (f"torch DataParallel, {n} GPU{'s' * (n > 1)}", rf"gpu/forward/{n}", "torch") for n in (1, 2, 4)
    ]),
    "check": ("The checker: times as slow", [
        (f"{devices}: {what}", cases, peer)
        for what, peer in (("on against off", "checker on"), ("off, against a build without it", "before"))
        for devices, cases in (("software GPUs", r"software/.*"), ("GPUs", r"gpu/.*"))
    ]),
    "predict": ("Virtual time, a ring of copies: predicted for measured time", [
        (f"{n} GPUs, 64 MB to 1 GB", rf".*/{n}", "predicted") for n in (2, 4)
    ]),
    "build": ("Building a pool: times as fast as bare contexts", against({"contexts": ""}, r"gpu/\d", [
        "with the embedded cubins: ", "the same, nothing in the driver's cache: /cold_cache",
        "the driver compiles the PTX, cache empty: /ptx_cold", "the driver has compiled the PTX before: /ptx_warm",
    ])),
    "overlap": ("A training step: times as fast as DDP's", [
        (f"{words}, batch {batch}", rf"gpu/{case}/\d/{batch}", "DDP")
        for words, case in (("step", "step"), ("the same without exchange", "alone")) for batch in (8192, 65536)
    ]),
    "memory": ("The memory pool: times as fast as others", against(also("cuMemAllocAsync", "PyTorch"), "gpu/", [
        r"small blocks: small/.*", r"large blocks: large/\d+", r"freed by other threads: remote/.*",
        r"random sizes: rmm_random/\d+/\d+",
    ])),
    "ring": ("The ring: times as fast as others", against(also("rtrb", "crossbeam-channel", "std sync_channel"), "", [
        "single pushes: single/.*", "batches of 32: batch_32/.*", "round trips: round_trip/.*",
    ])),
}


# The axis, if it is not how many times as fast this crate is.
AXES = {
    "check": "the other's time / time with the checker off",
    "predict": "predicted time / measured time",
}


def escape(text):
    return text.replace("&", "&amp;").replace("<", "&lt;")


def words(x, y, text, size=13, anchor="start", fill="#2d343c"):
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text {place} {FONT} fill="{fill}">{escape(text)}</text>'


def upwards(x, y, text):
    """The title of a vertical axis."""
    return words(x, y, text, 12, "middle").replace("<text ", f'<text transform="rotate(-90 {x:.1f} {y:.1f})" ', 1)


def path(points, colour, dashes=""):
    """A curve. With dashes a curve below it can be seen."""
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashes = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>'


SIZES = "size of the buffer on each GPU"


def line(x1, y1, x2, y2, colour="#d5dae0", width=1):
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{width}"/>'


def page(width, height, parts):
    head = f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">'
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="#ffffff"/>', *parts, "</svg>"]) + "\n"


def ticks(low, high):
    """1, 2 and 5 times the powers of ten from `low` to `high`; fewer if there are many."""
    every = [factor * 10.0**power for power in range(-3, 5) for factor in (1, 2, 5)]
    found = [tick for tick in every if low <= tick <= high]
    return found if len(found) <= 9 else [tick for tick in found if f"{tick:e}"[0] == "1"]


def legend(names, colours, x, y):
    out = []
    for name in names:
        out += [f'<circle cx="{x:.1f}" cy="{y - 4:.1f}" r="4" fill="{colours[name]}"/>', words(x + 9, y, name, 12)]
        x += 26 + 6.6 * len(name)
    return out


def dots(bench, rows, ages):
    """The plot of a bench with lines in `LINES`. `ages` has the dates of each machine's runs."""
    heading, wanted = LINES[bench]
    found = []
    for label, cases, peer in wanted:
        points = [
            (row["machine"], row["ratio"])
            for row in rows
            if row.get("ratio") and re.fullmatch(cases, row["case"]) and (row.get("peer") or "").startswith(peer)
        ]
        if points:
            found.append((label, points))
    machines = list(dict.fromkeys(machine for _, points in found for machine, _ in points))
    colours = dict(zip(machines, COLOURS))
    names = {f"{machine} ({ages[machine]})": colour for machine, colour in colours.items()}
    ratios = [ratio for _, points in found for _, ratio in points]
    low, high = min(0.5, *ratios) / 1.15, max(2.0, *ratios) * 1.15

    width, left, right, top, step = 900, 330, 25, 62, 34
    bottom = top + step * len(found)
    place = lambda ratio: left + (width - left - right) * math.log(ratio / low) / math.log(high / low)
    out = [words(16, 24, heading, 16), *legend(names, names, 22, 46)]
    for tick in ticks(low, high):
        out += [line(place(tick), top, place(tick), bottom), words(place(tick), bottom + 18, f"{tick:g}", 12, "middle")]
    out.append(line(place(1), top, place(1), bottom, "#2d343c", 1.5))
    for at, (label, points) in enumerate(found):
        middle = top + step * (at + 0.5)
        out += [line(left, top + step * (at + 1), width - right, top + step * (at + 1)), words(16, middle + 4, label)]
        for machine, ratio in points:
            y = middle + 7 * (machines.index(machine) - (len(machines) - 1) / 2)
            at = f'cx="{place(ratio):.1f}" cy="{y:.1f}"'
            out.append(f'<circle {at} r="4" fill="{colours[machine]}" fill-opacity="0.75"/>')
    axis = AXES.get(bench, "the other's time / time here; right of 1: this crate is faster")
    out.append(words(width - right, bottom + 38, axis, 12, "end"))
    return page(width, bottom + 50, out)


def curves(heading, found, name_of_size):
    """Curves of `found`: by name, the ratio at each size."""
    colours = dict(zip(found, COLOURS))
    sizes = sorted({size for points in found.values() for size in points})
    low = min(0.8, *(min(points.values()) for points in found.values())) / 1.05
    high = max(max(points.values()) for points in found.values()) * 1.05
    width, height, left, right, top, bottom = 900, 380, 72, 25, 62, 320
    across = lambda size: left + (width - left - right) * math.log2(size / sizes[0]) / math.log2(sizes[-1] / sizes[0])
    up = lambda ratio: bottom - (bottom - top) * math.log(ratio / low) / math.log(high / low)
    out = [words(16, 24, heading, 16), *legend(found, colours, 22, 46)]
    for tick in (0.8, 0.9, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.5, 3.0):
        if low <= tick <= high:
            dark = ("#2d343c", 1.5) if tick == 1.0 else ()
            out += [
                line(left, up(tick), width - right, up(tick), *dark),
                words(left - 8, up(tick) + 4, f"{tick:g}", 12, "end"),
            ]
    for size in sizes[::2]:
        out.append(words(across(size), bottom + 20, name_of_size(size), 11, "middle"))
    for name, points in found.items():
        out.append(path([(across(size), up(ratio)) for size, ratio in sorted(points.items())], colours[name]))
    out.append(upwards(20, (top + bottom) / 2, "best peer's time / time here"))
    out.append(words((left + width - right) / 2, bottom + 42, f"{SIZES}; above 1: this crate is faster", 12, "middle"))
    return page(width, height, out)


def sweep(heading, times, bandwidth, name_of_size):
    """Two panels against the size, for `times` by side and by size: these, and `bandwidth(size, time)`."""
    colours = dict(zip(times, COLOURS))
    width, height, top, bottom = 900, 400, 70, 330
    out = [words(16, 24, heading, 16), *legend(times, colours, 22, 46)]
    sizes = sorted({size for points in times.values() for size in points})
    panels = [("time, us", lambda size, time: math.log(time), ticks, math.log, 72),
              ("bus bandwidth, GB/s", bandwidth, lambda _, high: range(0, int(high) + 1, 50), float, width / 2 + 72)]
    for title, of, marks, at, left in panels:
        right = left + width / 2 - 97
        values = [of(size, time) for points in times.values() for size, time in points.items()]
        low, high = min(0.0, *values), max(values)
        across = lambda size: left + (right - left) * math.log2(size / sizes[0]) / math.log2(sizes[-1] / sizes[0])
        up = lambda value: bottom - (bottom - top) * (value - low) / (high - low)
        for tick in marks(math.exp(low), math.exp(high)) if at is math.log else marks(low, high):
            y = up(at(tick))
            out += [line(left, y, right, y), words(left - 8, y + 4, f"{tick:g}", 12, "end")]
        for size in sizes[::4]:
            out.append(words(across(size), bottom + 20, name_of_size(size), 11, "middle"))
        for at_line, (name, points) in enumerate(times.items()):
            # The last two lie on others.
            dashes = "6 8" if at_line > 2 else ""
            curve = [(across(size), up(of(size, time))) for size, time in sorted(points.items())]
            out.append(path(curve, colours[name], dashes))
        out.append(upwards(left - 48, (top + bottom) / 2, title))
        out.append(words((left + right) / 2, bottom + 42, SIZES, 12, "middle"))
    return page(width, height, out)
