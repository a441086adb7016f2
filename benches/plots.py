"""Draws what `tables.py` shows as SVG, with nothing but the standard library.

Two kinds of plots. `dots`: a line for each comparison, a dot for each case in it, at the ratio of the peer's time to
ours. `curves`: that ratio against the size, a curve for each number of devices.
"""
import math
import re

FONT = 'font-family="sans-serif"'
# Of Paul Tol's "bright" scheme, which people with any kind of colour vision can tell apart.
COLOURS = ["#4477aa", "#ee6677", "#228833", "#aa3377", "#ccbb44"]

# By bench: the heading, and the lines: words, the cases, and the beginning of the peer's name.
LINES = {
    "scope": ("How many times as fast a scope is", [
        ("rayon broadcast, threads awake", r"\w+/\d+", "rayon"),
        ("rayon broadcast, threads asleep", r".*/idle_300us", "rayon"),
        ("crossbeam spawn, threads awake", r"\w+/\d+", "crossbeam"),
        ("crossbeam spawn, threads asleep", r".*/idle_300us", "crossbeam"),
    ]),
    "launch": ("How many times as fast threads are", [
        ("launch, against processes", r"gpu/launch/\d", "processes"),
        ("launch (raw), against processes", r"gpu/launch_raw/\d", "processes"),
        ("launch and wait, against processes", r"gpu/launch_synchronise/\d", "processes"),
        ("copy of 4 KB, against processes", r"gpu/copy_4K/\d", "processes"),
        ("record and wait, against processes", r"gpu/record_wait/\d", "processes"),
        ("allocate and free, against processes", r"gpu/allocate_free/\d", "processes"),
        ("allocate and free, against cuMemAllocAsync", r"gpu/allocate_free/\d", "cuMemAllocAsync"),
    ]),
    "copy": ("How many times as fast copies are", [
        ("pageable memory, up", r"gpu/pageable_up/.*", "driver"),
        ("pageable memory, down", r"gpu/pageable_down/.*", "driver"),
        ("pinned memory, up", r"gpu/pinned_up/.*", "driver"),
        ("pinned memory, down", r"gpu/pinned_down/.*", "driver"),
        ("between GPUs, direct", r"gpu/peer/.*", "driver"),
        ("between GPUs, staged through the host", r"gpu/staged/.*", "pinned"),
    ]),
    "data_parallel": ("How many times as fast a forward pass is", [
        (f"torch DataParallel, {n} GPU{'s' * (n > 1)}", rf"gpu/forward/{n}", "torch") for n in (1, 2, 4)
    ]),
    "check": ("What the checker costs", [
        ("software GPUs: on against off", r"software/.*", "checker on"),
        ("GPUs: on against off", r"gpu/.*", "checker on"),
        ("software GPUs: off, against a build without it", r"software/.*", "before"),
        ("GPUs: off, against a build without it", r"gpu/.*", "before"),
    ]),
    "predict": ("Predicted time for measured time, ring of copies", [
        ("2 GPUs, 64 MB to 1 GB", r".*/2", "predicted"),
        ("4 GPUs, 64 MB to 1 GB", r".*/4", "predicted"),
    ]),
    "build": ("How many times as fast a pool is built as bare contexts", [
        ("with the embedded cubins", r"gpu/\d", "contexts"),
        ("the same, nothing in the driver's cache", r"gpu/\d/cold_cache", "contexts"),
        ("the driver compiles the PTX, cache empty", r"gpu/\d/ptx_cold", "contexts"),
        ("the driver has compiled the PTX before", r"gpu/\d/ptx_warm", "contexts"),
    ]),
    "overlap": ("How many times as fast a training step is as DDP's", [
        ("step, batch 8192", r"gpu/step/\d/8192", "DDP"),
        ("step, batch 65536", r"gpu/step/\d/65536", "DDP"),
        ("the same without exchange, batch 8192", r"gpu/alone/\d/8192", "DDP"),
        ("the same without exchange, batch 65536", r"gpu/alone/\d/65536", "DDP"),
    ]),
    "memory": ("How many times as fast the memory pool is", [
        (f"{words}, against {peer}", cases, peer)
        for words, cases in [
            ("small blocks", r"gpu/small/.*"), ("large blocks", r"gpu/large/\d+"),
            ("freed by other threads", r"gpu/remote/.*"), ("random sizes", r"gpu/rmm_random/\d+/\d+"),
        ]
        for peer in ("cuMemAllocAsync", "PyTorch")
    ]),
    "ring": ("How many times as fast the ring is", [
        (f"{words}, against {peer}", rf"{case}/.*", peer)
        for words, case in [("single pushes", "single"), ("batches of 32", "batch_32"), ("round trips", "round_trip")]
        for peer in ("rtrb", "crossbeam-channel", "std sync_channel")
    ]),
}


# What the axis shows, where it is not how many times as fast this crate is.
AXES = {
    "check": "the other's time / time with the checker off",
    "predict": "predicted time / measured time",
}


def escape(text):
    return text.replace("&", "&amp;").replace("<", "&lt;")


def words(x, y, text, size=13, anchor="start", fill="#2d343c"):
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" {FONT} fill="{fill}">{escape(text)}</text>'


def line(x1, y1, x2, y2, colour="#d5dae0", width=1):
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{width}"/>'


def page(width, height, parts):
    head = f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">'
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="#ffffff"/>', *parts, "</svg>"]) + "\n"


def ticks(low, high):
    """1, 2 and 5 times the powers of ten from `low` to `high`, thinned out where there are many."""
    every = [factor * 10.0**power for power in range(-3, 5) for factor in (1, 2, 5)]
    found = [tick for tick in every if low <= tick <= high]
    return found if len(found) <= 9 else [tick for tick in found if f"{tick:e}"[0] == "1"]


def legend(names, colours, x, y):
    out = []
    for name in names:
        out += [f'<circle cx="{x:.1f}" cy="{y - 4:.1f}" r="4" fill="{colours[name]}"/>', words(x + 9, y, name, 12)]
        x += 26 + 6.6 * len(name)
    return out


def dots(bench, rows):
    """The plot of a bench with lines in `LINES`."""
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
    ratios = [ratio for _, points in found for _, ratio in points]
    low, high = min(0.5, *ratios) / 1.15, max(2.0, *ratios) * 1.15

    width, left, right, top, step = 900, 330, 25, 62, 34
    bottom = top + step * len(found)
    place = lambda ratio: left + (width - left - right) * math.log(ratio / low) / math.log(high / low)
    out = [words(16, 24, heading, 16), *legend(machines, colours, 22, 46)]
    for tick in ticks(low, high):
        out += [line(place(tick), top, place(tick), bottom), words(place(tick), bottom + 18, f"{tick:g}", 12, "middle")]
    out.append(line(place(1), top, place(1), bottom, "#2d343c", 1.5))
    for at, (label, points) in enumerate(found):
        middle = top + step * (at + 0.5)
        out += [line(left, top + step * (at + 1), width - right, top + step * (at + 1)), words(16, middle + 4, label)]
        for machine, ratio in points:
            y = middle + 7 * (machines.index(machine) - (len(machines) - 1) / 2)
            out.append(f'<circle cx="{place(ratio):.1f}" cy="{y:.1f}" r="4" fill="{colours[machine]}" fill-opacity="0.75"/>')
    axis = AXES.get(bench, "the other's time / time here; right of 1: this crate is faster")
    out.append(words(width - right, bottom + 38, axis, 12, "end"))
    return page(width, bottom + 50, out)


def curves(heading, found, name_of_size):
    """`found`: by name, the ratio at each size."""
    colours = dict(zip(found, COLOURS))
    sizes = sorted({size for points in found.values() for size in points})
    low = min(0.8, *(min(points.values()) for points in found.values())) / 1.05
    high = max(max(points.values()) for points in found.values()) * 1.05
    width, height, left, right, top, bottom = 900, 380, 60, 25, 62, 320
    across = lambda size: left + (width - left - right) * math.log2(size / sizes[0]) / math.log2(sizes[-1] / sizes[0])
    up = lambda ratio: bottom - (bottom - top) * math.log(ratio / low) / math.log(high / low)
    out = [words(16, 24, heading, 16), *legend(found, colours, 22, 46)]
    for tick in (0.8, 0.9, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0):
        if low <= tick <= high:
            dark = ("#2d343c", 1.5) if tick == 1.0 else ()
            out += [line(left, up(tick), width - right, up(tick), *dark), words(left - 8, up(tick) + 4, f"{tick:g}", 12, "end")]
    for size in sizes[::2]:
        out.append(words(across(size), bottom + 20, name_of_size(size), 11, "middle"))
    for name, points in found.items():
        path = " ".join(f"{across(size):.1f},{up(ratio):.1f}" for size, ratio in sorted(points.items()))
        out.append(f'<polyline points="{path}" fill="none" stroke="{colours[name]}" stroke-width="2"/>')
    out.append(words(width - right, height - 14, "best time of NCCL / time here; above 1: this crate is faster", 12, "end"))
    return page(width, height, out)
