//! The comparison as a picture: times on the left, and on the right the factor by which the hierarchy is faster.

use super::{Case, EACH, RANGE};
use crate::{
    plot::{line, on_paper, size_mark, time_mark},
    report,
    style::{COLOURS, Entry, INK, MIDDLE, legend, text},
};
use anyhow::Result;
use plotters::{coord::Shift, prelude::*};
use std::path::Path;

const SIZE: (u32, u32) = (1280, 740);
/// The hosts of the machines of the picture, in the order of the colours.
const DRAWN: [usize; 4] = [2, 8, 32, 128];
/// The largest size on the left.
const MOST: usize = 1 << 30;

/// Draws the cases.
pub fn draw(path: &Path, cases: &[Case]) -> Result<()> {
    on_paper!(path, SIZE, |area| picture(&area, cases))
}

fn picture<B: DrawingBackend>(area: &DrawingArea<B, Shift>, cases: &[Case]) -> Result<()>
where
    B::ErrorType: 'static,
{
    area.fill(&WHITE)?;
    let most = cases.iter().filter(|case| !case.runs.is_empty()).map(|case| EACH * case.hosts).max().unwrap_or(0);
    let title = format!(
        "All-reduce of f32 over hosts of {EACH} x H200, NICs of 50 GB/s. Dots: runs in virtual time, up to {most} \
         devices; lines: the cost model"
    );
    let area = area.margin(12, 4, 4, 4).titled(&title, text(20))?;
    let (charts, below) = area.split_vertically(SIZE.1 - 170);
    let (left, right) = charts.split_horizontally(SIZE.0 * 52 / 100);
    let (left_key, right_key) = below.split_horizontally(SIZE.0 * 52 / 100);
    legend(&left_key.margin(4, 24, 92, 4), 2, times(&left, cases)?)?;
    legend(&right_key.margin(4, 4, 78, 4), 2, factors(&right, cases)?)?;
    area.present()?;
    Ok(())
}

fn of(cases: &[Case], hosts: usize, nics: usize) -> Option<&Case> {
    cases.iter().find(|case| (case.hosts, case.nics) == (hosts, nics))
}

/// Four sizes for each power of two, so that steps of the model are seen.
fn sizes(most: usize) -> impl Iterator<Item = usize> {
    let steps = most.ilog2() - RANGE.start().ilog2();
    (0..=4 * steps).map(|k| (*RANGE.start() as f64 * (f64::from(k) / 4.0).exp2()) as usize / 256 * 256)
}

fn log(value: f64) -> f64 {
    value.log2()
}

/// Returns the legend.
fn times<B: DrawingBackend>(area: &DrawingArea<B, Shift>, cases: &[Case]) -> Result<Vec<Entry<B>>>
where
    B::ErrorType: 'static,
{
    // Microseconds as logarithms to base 10, bytes to base 2: the ticks fall on round numbers.
    let mut chart = ChartBuilder::on(area)
        .margin(14)
        .x_label_area_size(50)
        .y_label_area_size(78)
        .build_cartesian_2d(log(1024.0) - 0.3..log(MOST as f64) + 0.3, 2.0..5.0_f64)?;
    let mut mesh = chart.configure_mesh();
    mesh.x_desc("size of the buffer on each device").y_desc("time of one all-reduce, a NIC for each device");
    mesh.label_style(text(15)).axis_desc_style(text(16)).axis_style(INK.mix(0.6));
    mesh.bold_line_style(INK.mix(0.12)).light_line_style(TRANSPARENT);
    mesh.x_labels(11).x_label_formatter(&|x| size_mark(x)).y_labels(4).y_label_formatter(&|y| time_mark(*y));
    mesh.draw()?;
    let mut entries = Vec::new();
    for (hosts, colour) in DRAWN.into_iter().zip(COLOURS) {
        let Some(case) = of(cases, hosts, EACH) else { continue };
        for (way, width, what) in [(1, 3, "hierarchy"), (0, 1, "flat ring")] {
            let style = colour.stroke_width(width);
            let times = sizes(MOST).map(|bytes| (log(bytes as f64), case.modelled(bytes)[way].log10()));
            chart.draw_series(LineSeries::new(times, style))?;
            entries.push((line(style), format!("{hosts} hosts, {} devices: {what}", EACH * hosts)));
            let ran = case.runs.iter().map(|&(bytes, times)| (log(bytes as f64), times[way].log10()));
            chart.draw_series(ran.map(|point| Circle::new(point, 4, colour.filled())))?;
        }
    }
    Ok(entries)
}

/// Returns the legend.
fn factors<B: DrawingBackend>(area: &DrawingArea<B, Shift>, cases: &[Case]) -> Result<Vec<Entry<B>>>
where
    B::ErrorType: 'static,
{
    let most = log(*RANGE.end() as f64);
    let mut chart = ChartBuilder::on(area)
        .margin(14)
        .x_label_area_size(50)
        .y_label_area_size(64)
        .build_cartesian_2d(log(1024.0) - 0.3..most + 0.3, -1.0..5.0_f64)?;
    let mut mesh = chart.configure_mesh();
    mesh.x_desc("size of the buffer on each device").y_desc("flat ring / hierarchy: above 1 the hierarchy wins");
    mesh.label_style(text(15)).axis_desc_style(text(16)).axis_style(INK.mix(0.6));
    mesh.bold_line_style(INK.mix(0.12)).light_line_style(TRANSPARENT);
    let factor = |y: &f64| report::factor(y.exp2());
    mesh.x_labels(7).x_label_formatter(&|x| size_mark(x)).y_labels(7).y_label_formatter(&factor);
    mesh.draw()?;
    chart.draw_series(LineSeries::new([(log(1024.0), 0.0), (most, 0.0)], INK.stroke_width(1)))?;
    let mut entries = Vec::new();
    for (hosts, colour) in DRAWN.into_iter().zip(COLOURS) {
        for (nics, width, what) in [(EACH, 3, "a NIC for each device"), (1, 1, "one NIC")] {
            let Some(case) = of(cases, hosts, nics) else { continue };
            let ratio = |bytes: usize| {
                let [flat, hierarchy] = case.modelled(bytes);
                (log(bytes as f64), log(flat / hierarchy))
            };
            let style = colour.stroke_width(width);
            chart.draw_series(LineSeries::new(sizes(*RANGE.end()).map(ratio), style))?;
            entries.push((line(style), format!("{hosts} hosts, {what}")));
            let ran = case.runs.iter().map(|&(bytes, [flat, hierarchy])| (log(bytes as f64), log(flat / hierarchy)));
            chart.draw_series(ran.map(|point| Circle::new(point, 4, colour.filled())))?;
            let wins = case
                .model
                .crossing(RANGE)
                .map(|bytes| Circle::new((log(bytes as f64), 0.0), 6, colour.stroke_width(2)));
            chart.draw_series(wins)?;
        }
    }
    let crossing = Circle::new(MIDDLE, 6, INK.stroke_width(2)).into_dyn();
    entries.push((crossing, "from here on the flat ring wins".to_owned()));
    Ok(entries)
}
