//! Rows of bars over time as an SVG picture, for [`TaskTrace`](super::TaskTrace).

use crate::parallel::schedule::svg::Chart;
use std::{fmt::Write, time::Duration};

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
    let chart = Chart { left: 128.0, top: 40.0, row: 24.0, gap: 4.0, letter: 7.0, end, width: 1100.0 };
    chart.picture(&format!("{} tasks, {end:?}", bars().count()), rows.len(), |svg| {
        chart.axis(svg, rows.len())?;
        for (number, (name, bars)) in rows.iter().enumerate() {
            let y = chart.y(number);
            writeln!(svg, "<text x=\"12\" y=\"{}\">{name}</text>", y + 16.0)?;
            bars.iter().try_for_each(|bar| draw(svg, &chart, y, start, bar))?;
        }
        Ok(())
    })
}

fn draw(svg: &mut String, chart: &Chart, y: f64, zero: Duration, bar: &Bar) -> std::fmt::Result {
    let (start, end, label) = (bar.start - zero, bar.end - zero, escaped(&bar.label));
    let x = chart.x(start);
    // A task without work is a line.
    let width = (chart.x(end) - x).max(1.0);
    let (title, paint) = (format!("{label}: {start:?} to {end:?}"), format!("fill=\"{}\"", bar.fill));
    chart.bar(svg, (x, y, width), &title, &label, &paint)
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
