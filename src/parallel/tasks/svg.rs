//! Rows of bars over time as an SVG picture, for [`TaskTrace`](super::TaskTrace).

use crate::parallel::schedule::svg::{Scale, open};
use std::{fmt::Write, time::Duration};

/// Pixels.
const LEFT: f64 = 128.0;
const RIGHT: f64 = 24.0;
const TOP: f64 = 40.0;
const ROW: f64 = 24.0;
const GAP: f64 = 4.0;
const AXIS: f64 = 44.0;
const WIDTH: f64 = 1100.0;
/// Of a letter of the labels, which are 11 pixels high.
const LETTER: f64 = 7.0;

/// One task in its row.
pub(super) struct Bar {
    pub label: String,
    pub start: Duration,
    pub end: Duration,
    pub fill: &'static str,
}

/// The picture. Time starts with the first bar.
pub(super) fn rows(rows: &[(String, Vec<Bar>)]) -> String {
    let bars = || rows.iter().flat_map(|(_, bars)| bars);
    let start = bars().map(|bar| bar.start).min().unwrap_or_default();
    let end = bars().map(|bar| bar.end).max().unwrap_or_default() - start;
    let scale = Scale { left: LEFT, end, width: WIDTH };
    let bottom = TOP + rows.len() as f64 * (ROW + GAP);
    let mut svg = String::new();
    let title = format!("{} tasks, {end:?}", bars().count());
    // Writing to a string cannot fail.
    let _ = open(&mut svg, &title, LEFT + WIDTH + RIGHT, bottom + AXIS);
    let _ = scale.axis(&mut svg, bottom);
    for (number, (name, bars)) in rows.iter().enumerate() {
        let y = TOP + number as f64 * (ROW + GAP);
        let _ = writeln!(svg, "<text x=\"12\" y=\"{}\">{name}</text>", y + 16.0);
        for bar in bars {
            let _ = draw(&mut svg, &scale, y, start, bar);
        }
    }
    svg.push_str("</svg>\n");
    svg
}

fn draw(svg: &mut String, scale: &Scale, y: f64, zero: Duration, bar: &Bar) -> std::fmt::Result {
    let Bar { label, start, end, fill } = bar;
    let (start, end, label) = (*start - zero, *end - zero, escaped(label));
    let x = scale.x(start);
    // A task without work is a line.
    let width = (scale.x(end) - x).max(1.0);
    write!(
        svg,
        "<g><title>{label}: {start:?} to {end:?}</title><rect x=\"{x:.2}\" y=\"{y}\" width=\"{width:.2}\" \
         height=\"{ROW}\" fill=\"{fill}\" stroke=\"#fff\"/>"
    )?;
    if LETTER * label.len() as f64 <= width {
        let (x, y) = (x + width / 2.0, y + 16.0);
        write!(svg, "<text x=\"{x:.2}\" y=\"{y}\" font-size=\"11\" text-anchor=\"middle\">{label}</text>")?;
    }
    writeln!(svg, "</g>")
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
