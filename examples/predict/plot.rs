//! The predictions as a picture, SVG or PNG: time on the left, bus bandwidth on the right.

use crate::{
    Point, measured, report,
    style::{COLOURS, Entry, INK, MIDDLE, legend, text},
};
use anyhow::{Result, bail};
use plotters::{coord::Shift, element::DynElement, prelude::*};
use std::path::Path;

const SIZE: (u32, u32) = (1280, 660);

/// Checks the file name's extension before the predictions run, not after.
pub fn check(path: &Path) -> Result<()> {
    match path.extension().and_then(|e| e.to_str()) {
        Some("svg" | "png") => Ok(()),
        _ => bail!("--plot {}: the name must end in .svg or .png", path.display()),
    }
}

/// Draws by a function of a drawing area: as SVG, or as PNG.
macro_rules! on_paper {
    ($path:expr, $size:expr, |$area:ident| $draw:expr) => {{
        use plotters::prelude::*;
        crate::style::load_font();
        if $path.extension().is_some_and(|e| e == "png") {
            // Gives a plain message if the file cannot be written.
            std::fs::File::create($path)?;
            let $area = BitMapBackend::new($path, $size).into_drawing_area();
            $draw
        } else {
            let mut svg = String::new();
            {
                let $area = SVGBackend::with_string(&mut svg, $size).into_drawing_area();
                $draw?;
            }
            std::fs::write($path, svg)?;
            Ok(())
        }
    }};
}
pub(crate) use on_paper;

/// Draws a line for each machine, and the measurements.
pub fn draw(path: &Path, curves: &[(String, Vec<Point>)], pieces: usize) -> Result<()> {
    on_paper!(path, SIZE, |area| picture(&area, curves, pieces))
}

fn picture<B: DrawingBackend>(
    area: &DrawingArea<B, Shift>,
    curves: &[(String, Vec<Point>)],
    pieces: usize,
) -> Result<()>
where
    B::ErrorType: 'static,
{
    area.fill(&WHITE)?;
    let title = format!("All-reduce of f32 by a ring of copy engines, {pieces} pieces: predicted in virtual time");
    let area = area.margin(12, 4, 4, 4).titled(&title, text(22))?;
    let (charts, below) = area.split_vertically(SIZE.1 - 110);
    let (left, right) = charts.split_horizontally(SIZE.0 * 53 / 100);
    times(&left, curves)?;
    bandwidths(&right, curves)?;
    let machines = curves.iter().zip(COLOURS.iter().cycle());
    let mut entries: Vec<Entry<B>> =
        machines.map(|((name, _), colour)| (line(colour.stroke_width(3)), format!("{name}: predicted"))).collect();
    let measured = INK.stroke_width(2);
    entries
        .push((Circle::new(MIDDLE, 7, measured).into_dyn(), "8 x H200: this ring, measured by 2026-11-21".to_owned()));
    entries
        .push((Cross::new(MIDDLE, 6, measured).into_dyn(), "8 x H200: NCCL 2.28.9, measured by 2026-11-21".to_owned()));
    legend(&below.margin(4, 4, 92, 14), 3, entries)?;
    area.present()?;
    Ok(())
}

/// A line in a legend.
pub fn line<B: DrawingBackend>(style: ShapeStyle) -> DynElement<'static, B, (i32, i32)> {
    PathElement::new([(MIDDLE.0 - 11, MIDDLE.1), (MIDDLE.0 + 11, MIDDLE.1)], style).into_dyn()
}

fn times<B: DrawingBackend>(area: &DrawingArea<B, Shift>, curves: &[(String, Vec<Point>)]) -> Result<()>
where
    B::ErrorType: 'static,
{
    // The drawn values are logarithms, of times to base 10 and of sizes to base 2: the ticks fall on round numbers.
    let time = |us: f64| us.log10();
    let all = || curves.iter().flat_map(|(_, points)| points).map(|point| time(point.timing.call));
    let known = || measured::RING.iter().chain(&measured::NCCL).map(|&(_, us)| time(us));
    let (low, high) = all().chain(known()).fold((f64::MAX, f64::MIN), |(low, high), y| (low.min(y), high.max(y)));
    let (low, high) = (low.floor(), high.ceil());
    let mut chart = ChartBuilder::on(area)
        .margin(14)
        .x_label_area_size(50)
        .y_label_area_size(78)
        .build_cartesian_2d(sizes(curves), low..high)?;
    let mut mesh = chart.configure_mesh();
    mesh.x_desc("size of the buffer on each device").y_desc("time of one all-reduce");
    mesh.label_style(text(15)).axis_desc_style(text(16)).axis_style(INK.mix(0.6));
    mesh.bold_line_style(INK.mix(0.12)).light_line_style(TRANSPARENT);
    mesh.x_labels(5).x_label_formatter(&size_mark);
    mesh.y_labels((high - low) as usize + 1).y_label_formatter(&|y| time_mark(*y));
    mesh.draw()?;
    for ((_, points), colour) in curves.iter().zip(COLOURS.iter().cycle()) {
        let line: Vec<_> = points.iter().map(|point| (size(point.bytes), time(point.timing.call))).collect();
        chart.draw_series(LineSeries::new(line.iter().copied(), colour.stroke_width(3)))?;
        chart.draw_series(line.into_iter().map(|point| Circle::new(point, 3, colour.filled())))?;
    }
    let at = |&(bytes, us): &(usize, f64)| (size(bytes), time(us));
    chart.draw_series(measured::RING.iter().map(|point| Circle::new(at(point), 8, INK.stroke_width(2))))?;
    chart.draw_series(measured::NCCL.iter().map(|point| Cross::new(at(point), 6, INK.stroke_width(2))))?;
    Ok(())
}

fn bandwidths<B: DrawingBackend>(area: &DrawingArea<B, Shift>, curves: &[(String, Vec<Point>)]) -> Result<()>
where
    B::ErrorType: 'static,
{
    let mut chart = ChartBuilder::on(area)
        .margin(14)
        .x_label_area_size(50)
        .y_label_area_size(64)
        .build_cartesian_2d(sizes(curves), 0.0..450.0)?;
    let mut mesh = chart.configure_mesh();
    mesh.x_desc("size of the buffer on each device").y_desc("bus bandwidth, GB/s");
    mesh.label_style(text(15)).axis_desc_style(text(16)).axis_style(INK.mix(0.6));
    mesh.bold_line_style(INK.mix(0.12)).light_line_style(TRANSPARENT);
    mesh.x_labels(5).x_label_formatter(&size_mark).y_labels(10).y_label_formatter(&|y| format!("{y:.0}"));
    mesh.draw()?;
    for ((_, points), colour) in curves.iter().zip(COLOURS.iter().cycle()) {
        let line: Vec<_> = points.iter().map(|point| (size(point.bytes), point.bus_bandwidth())).collect();
        chart.draw_series(LineSeries::new(line.iter().copied(), colour.stroke_width(3)))?;
        chart.draw_series(line.into_iter().map(|point| Circle::new(point, 3, colour.filled())))?;
    }
    let at = |&(bytes, us): &(usize, f64)| (size(bytes), 1.75 * bytes as f64 / us / 1e3);
    chart.draw_series(measured::RING.iter().map(|point| Circle::new(at(point), 8, INK.stroke_width(2))))?;
    chart.draw_series(measured::NCCL.iter().map(|point| Cross::new(at(point), 6, INK.stroke_width(2))))?;
    Ok(())
}

fn size(bytes: usize) -> f64 {
    (bytes as f64).log2()
}

/// The range of sizes, with a little room at both ends.
fn sizes(curves: &[(String, Vec<Point>)]) -> std::ops::Range<f64> {
    let all = || curves.iter().flat_map(|(_, points)| points).map(|point| size(point.bytes));
    all().fold(f64::MAX, f64::min) - 0.15..all().fold(f64::MIN, f64::max) + 0.25
}

/// Of the logarithm of a number of bytes.
pub fn size_mark(log: &f64) -> String {
    if (log - log.round()).abs() < 1e-6 { report::size(1 << log.round() as usize) } else { String::new() }
}

/// Of the logarithm of a number of microseconds.
pub fn time_mark(log: f64) -> String {
    let us = 10f64.powf(log).round();
    match us {
        ..1e3 => format!("{us:.0} us"),
        ..1e6 => format!("{:.0} ms", us / 1e3),
        _ => format!("{:.0} s", us / 1e6),
    }
}
