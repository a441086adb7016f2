//! The picture: address space over time, below it nothing that moves, above it how much it is.
//!
//! Time is counted in events, evenly spaced, and marked with clock times: allocations come in bursts, and by the clock a
//! burst would be one line (PyTorch's memory_viz does the same). Each block is a rectangle, coloured by who asked for it.
//! The plots are pieces of SVG of their own whose `viewBox` is their part of the time, so that a page can show less of it
//! without drawing anew.

use super::{
    layout::Layout,
    lifetime::{Block, Chunk, History, Row},
    markup::Escaped,
    site::Name,
    snapshot::MemorySnapshot,
    units::{Bytes, Micros},
};
use std::{cmp::Ordering, fmt::Write, ops::Range};

/// What the classes look like.
pub(crate) const STYLE: &str = include_str!("page/picture.css");

const SIZE: (f64, f64) = (1200.0, 660.0);
const LEFT: f64 = 84.0;
const WIDTH: f64 = SIZE.0 - LEFT - 12.0;
const CURVES: Plot = Plot { top: 22.0, height: 116.0 };
const MAP: Plot = Plot { top: 150.0, height: 470.0 };
const TICKS: usize = 7;
/// Call sites with a colour of their own; the others share the last.
const COLOURS: usize = 9;
/// Rectangles in a picture: browsers are quick with these, and there are not more pixels anyway.
const RECTANGLES: usize = 20_000;
/// Refusals that get a line through the whole picture.
const LINES: usize = 12;
/// Steps of a curve.
const STEPS: usize = 2000;

struct Plot {
    top: f64,
    height: f64,
}

/// A picture within a page, the `index`th there, and how many blocks it leaves out because they would be the smallest.
pub(crate) fn draw(snapshot: &MemorySnapshot, history: &History, index: usize) -> (String, usize) {
    let mut out = String::new();
    let label = format!("Memory of device {} over time", snapshot.device);
    write(
        &mut out,
        format_args!(
            "<svg class=\"memory\" viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{label}\" data-plot=\"{LEFT} {WIDTH}\" \
         data-times=\"{}\">\n",
            SIZE.0,
            SIZE.1,
            times(snapshot, history)
        ),
    );
    let left_out = content(&mut out, snapshot, history, index);
    out.push_str("</svg>\n");
    (out, left_out)
}

/// A picture that is a file: with its style, and the names that in a page stand in a table.
pub(crate) fn standalone(snapshot: &MemorySnapshot) -> String {
    let history = History::of(snapshot);
    let rows = &history.sites[..history.sites.len().min(COLOURS)];
    let height = SIZE.1 + 20.0 * rows.len() as f64 + if rows.is_empty() { 0.0 } else { 8.0 };
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"memory\" viewBox=\"0 0 {} {height}\" width=\"{}\" \
         height=\"{height}\">\n<style>\n{STYLE}</style>\n",
        SIZE.0, SIZE.0
    );
    content(&mut out, snapshot, &history, 0);
    for (i, row) in rows.iter().enumerate() {
        let y = SIZE.1 + 20.0 * i as f64;
        let (colour, peak, x) = (colour(i, row), Bytes(row.peak), LEFT + 18.0);
        write(
            &mut out,
            format_args!(
                "<rect class=\"{colour}\" x=\"{LEFT}\" y=\"{y}\" width=\"12\" height=\"12\" rx=\"3\"/><text x=\"{x}\" y=\"{}\">\
             {}, at most {peak}</text>\n",
                y + 10.5,
                Escaped(Name(row.site))
            ),
        );
    }
    out.push_str("</svg>\n");
    out
}

/// The colour of a call site, given its place in [`History::sites`].
pub(crate) fn colour(index: usize, row: &Row) -> String {
    if row.site.is_none() { "cn".to_owned() } else { format!("c{}", index.min(COLOURS)) }
}

fn content(out: &mut String, snapshot: &MemorySnapshot, history: &History, index: usize) -> usize {
    // Such names are of the whole document, and a page may hold several pictures.
    let hatch = format!("hatch-{index}");
    write(
        out,
        format_args!(
            "<defs><pattern id=\"{hatch}\" patternUnits=\"userSpaceOnUse\" width=\"6\" height=\"6\" \
         patternTransform=\"rotate(45)\"><path class=\"hatch\" d=\"M3 0V6\"/></pattern></defs>\n"
        ),
    );
    curves(out, history);
    let left_out = map(out, history, &hatch);
    axis(out, snapshot, history);
    left_out
}

fn curves(out: &mut String, history: &History) {
    let live = history.level(history.blocks.iter().map(|block| (&block.during, block.bytes)));
    let reserved = history.level(history.chunks.iter().map(|chunk| (&chunk.during, chunk.bytes)));
    let most = live.iter().chain(&reserved).copied().fold(1.0, f64::max);
    // Powers of two are round in binary units.
    let step = (most / 4.0).log2().ceil().clamp(0.0, 62.0).exp2();
    let Plot { top, height } = CURVES;
    let y = |level: f64| height - level / most * (height - 6.0);

    write(
        out,
        format_args!("<rect class=\"panel\" x=\"{LEFT}\" y=\"{top}\" width=\"{WIDTH}\" height=\"{height}\"/>\n"),
    );
    for level in (0..=4).map(|i| f64::from(i) * step).take_while(|&level| level <= most) {
        let (y, name) = (top + y(level), Bytes(level as u64));
        write(
            out,
            format_args!(
                "<path class=\"grid\" d=\"M{LEFT} {y:.1}H{}\"/><text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{name}</text>\n",
                LEFT + WIDTH,
                LEFT - 8.0,
                y + 4.0
            ),
        );
    }
    open_plot(out, &CURVES);
    let path = |levels: &[f64]| steps(levels, y);
    write(out, format_args!("<path class=\"live\" d=\"{}V{height}H0Z\"/>\n", path(&live)));
    write(out, format_args!("<path class=\"reserved\" d=\"{}\"/>\n", path(&reserved)));
    refusals(out, history, height);
    out.push_str("</svg>\n");
    let (now, then) = (live.last().copied().unwrap_or(0.0), reserved.last().copied().unwrap_or(0.0));
    write(
        out,
        format_args!(
            "<text x=\"{LEFT}\" y=\"{}\"><tspan class=\"name\">live</tspan> (filled) {} now, <tspan class=\"name\">reserved</tspan> \
         (line) {} now</text>\n",
            top - 8.0,
            Bytes(now as u64),
            Bytes(then as u64)
        ),
    );
}

/// A curve in steps, at most [`STEPS`] of them; each shows the most of its time, so that no peak is lost.
fn steps(levels: &[f64], y: impl Fn(f64) -> f64) -> String {
    let count = levels.len().min(STEPS);
    let mut path = String::new();
    let mut last = f64::NAN;
    for step in 0..count {
        let within = levels.len() * step / count..levels.len() * (step + 1) / count;
        let level = levels[within].iter().copied().fold(0.0, f64::max);
        if level != last {
            let x = WIDTH * step as f64 / count as f64;
            let (lead, y) = (if step == 0 { "M0 " } else { "V" }, y(level));
            if step > 0 {
                write(&mut path, format_args!("H{x:.2}"));
            }
            write(&mut path, format_args!("{lead}{y:.2}"));
            last = level;
        }
    }
    write(&mut path, format_args!("H{WIDTH}"));
    path
}

fn map(out: &mut String, history: &History, hatch: &str) -> usize {
    let Plot { top, height } = MAP;
    let range = |chunk: &Chunk| (chunk.address, chunk.bytes);
    let chunks: Vec<_> = history.chunks.iter().map(range).collect();
    let blocks = history.blocks.iter().map(|block| (block.address, block.bytes));
    let layout = Layout::new(height, &chunks, blocks.chain(history.pending.iter().map(range)));
    write(
        out,
        format_args!("<rect class=\"panel\" x=\"{LEFT}\" y=\"{top}\" width=\"{WIDTH}\" height=\"{height}\"/>\n"),
    );
    for (from, tall, bytes) in layout.runs().filter(|&(_, tall, _)| tall >= 14.0) {
        let (x, y) = (LEFT - 4.0, top + from);
        write(
            out,
            format_args!(
                "<path class=\"extent\" d=\"M{x} {:.1}v{:.1}\"/><text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>\n",
                y + 1.0,
                tall - 2.0,
                x - 5.0,
                y + tall / 2.0 + 4.0,
                Bytes(bytes)
            ),
        );
    }
    open_plot(out, &MAP);
    for chunk in &history.chunks {
        let Some(spot) = Spot::of(&layout, history, range(chunk), &chunk.during, 0.0) else { continue };
        let Chunk { address, bytes, .. } = *chunk;
        write(
            out,
            format_args!(
                "<rect class=\"chunk\" {spot}><title>chunk of {} at {address:#x}</title></rect>\n",
                Bytes(bytes)
            ),
        );
    }
    let mut drawn: Vec<(Spot, &Block)> = Vec::with_capacity(history.blocks.len());
    for block in history.blocks.iter().filter(|block| !block.during.is_empty()) {
        if let Some(spot) = Spot::of(&layout, history, (block.address, block.bytes), &block.during, 0.6) {
            drawn.push((spot, block));
        }
    }
    let left_out = drawn.len().saturating_sub(RECTANGLES);
    if left_out > 0 {
        let area = |(spot, _): &(Spot, &Block)| spot.width * spot.height;
        drawn.sort_by(|a, b| area(b).partial_cmp(&area(a)).unwrap_or(Ordering::Equal));
        drawn.truncate(RECTANGLES);
    }
    for (spot, block) in &drawn {
        let row = &history.sites[block.site];
        write(out, format_args!("<rect class=\"b {} s{}\" {spot}><title>", colour(block.site, row), block.site));
        title(out, block, row);
        out.push_str("</title></rect>\n");
    }
    for chunk in &history.pending {
        let Some(spot) = Spot::of(&layout, history, range(chunk), &chunk.during, 0.6) else { continue };
        write(
            out,
            format_args!(
                "<rect fill=\"url(#{hatch})\" {spot}><title>{} freed, but still used by queued work</title></rect>\n",
                Bytes(chunk.bytes)
            ),
        );
    }
    refusals(out, history, height);
    out.push_str("</svg>\n");
    left_out
}

/// A rectangle in a plot. Its `Display` is its attributes.
struct Spot {
    x: f64,
    y: f64,
    width: f64,
    height: f64,
}

impl Spot {
    /// `inset` keeps neighbours of one colour apart where there is room; what is thin stays at least a hair.
    fn of(layout: &Layout, history: &History, range: (u64, u64), during: &Range<usize>, inset: f64) -> Option<Self> {
        let (y, height) = layout.place(range)?;
        let scale = WIDTH / history.end as f64;
        let (x, width) = (during.start as f64 * scale, during.len() as f64 * scale);
        let shrink = |size: f64| if size > 3.0 { size - inset } else { size.max(0.3) };
        Some(Spot { x, y, width: shrink(width), height: shrink(height) })
    }
}

impl std::fmt::Display for Spot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Spot { x, y, width, height } = self;
        write!(f, "x=\"{x:.2}\" y=\"{y:.2}\" width=\"{width:.2}\" height=\"{height:.2}\"")
    }
}

fn title(out: &mut String, block: &Block, row: &Row) {
    let Block { address, bytes, requested, stream, born, died, remote, .. } = *block;
    write(out, format_args!("{} at {address:#x}", Bytes(bytes)));
    if requested > 0 {
        write(out, format_args!(", asked for {}", Bytes(requested)));
    }
    write(out, format_args!("\n{}", Escaped(Name(row.site))));
    if let Some(stream) = stream {
        write(out, format_args!("\non stream {stream}"));
    }
    let by = if remote { " by another thread" } else { "" };
    match (born, died) {
        (Some(born), Some(died)) => {
            let lived = Micros(died.saturating_sub(born));
            write(out, format_args!("\nfrom {} to {}: {lived}, freed{by}", Micros(born), Micros(died)));
        }
        (Some(born), None) => write(out, format_args!("\nsince {}", Micros(born))),
        (None, Some(died)) => write(out, format_args!("\nuntil {}, freed{by}", Micros(died))),
        (None, None) => {}
    }
}

/// Lines where a request was refused; only short ones where so many would hide the rest.
fn refusals(out: &mut String, history: &History, height: f64) {
    let height = if history.refusals.len() > LINES { 10.0 } else { height };
    let mut last = f64::NEG_INFINITY;
    for &at in &history.refusals {
        let x = (at as f64 + 0.5) * WIDTH / history.end as f64;
        if x - last < 1.0 {
            continue;
        }
        last = x;
        write(
            out,
            format_args!("<path class=\"refused\" d=\"M{x:.2} 0V{height}\"><title>out of memory</title></path>\n"),
        );
    }
}

fn axis(out: &mut String, snapshot: &MemorySnapshot, history: &History) {
    let bottom = MAP.top + MAP.height;
    if snapshot.events.is_empty() {
        let how = super::HOW_TO_RECORD;
        let why = if snapshot.recorded {
            "nothing has happened yet".to_owned()
        } else {
            format!("for the past, record it: {how}")
        };
        write(out, format_args!("<text x=\"{LEFT}\" y=\"{}\">now; {}</text>\n", bottom + 18.0, Escaped(why)));
        return;
    }
    for tick in 0..TICKS {
        let part = tick as f64 / (TICKS - 1) as f64;
        let anchor = ["start", "middle", "end"][usize::from(tick > 0) + usize::from(tick == TICKS - 1)];
        let time = Micros(time(snapshot, history, part));
        write(
            out,
            format_args!(
                "<path class=\"grid\" d=\"M{x:.1} {bottom}v5\"/><text class=\"tick\" x=\"{x:.1}\" y=\"{}\" text-anchor=\"{anchor}\">\
             {time}</text>\n",
                bottom + 18.0,
                x = LEFT + WIDTH * part
            ),
        );
    }
}

/// When it is, at a part of the width.
fn time(snapshot: &MemorySnapshot, history: &History, part: f64) -> u64 {
    let event = (history.end as f64 * part) as usize;
    snapshot.events.get(event).map_or(snapshot.taken_at, |event| event.micros)
}

/// Times at evenly spaced parts of the width, for marks elsewhere.
fn times(snapshot: &MemorySnapshot, history: &History) -> String {
    let count = history.end.min(512);
    let times = (0..=count).map(|i| time(snapshot, history, i as f64 / count as f64).to_string());
    times.collect::<Vec<_>>().join(" ")
}

fn open_plot(out: &mut String, &Plot { top, height }: &Plot) {
    write(
        out,
        format_args!(
            "<svg class=\"plot\" x=\"{LEFT}\" y=\"{top}\" width=\"{WIDTH}\" height=\"{height}\" viewBox=\"0 0 {WIDTH} {height}\" \
         preserveAspectRatio=\"none\">\n"
        ),
    );
}

/// Text does not fail.
fn write(out: &mut String, text: std::fmt::Arguments<'_>) {
    out.write_fmt(text).expect("a string takes all text");
}

#[cfg(test)]
#[path = "picture_tests.rs"]
mod tests;
