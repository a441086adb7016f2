//! The devices' work over time, as an SVG.

#[path = "../plot/style.rs"]
mod style;

use crate::{Done, SIZES};
use anyhow::Result;
use plotters::prelude::*;
use std::{fs, path::Path};
use style::{COLOURS, INK, MIDDLE, legend, load_font, text};

/// Dark for the largest jobs, 0, light for the smallest.
fn colour(size: usize) -> RGBColor {
    let part = 1.0 - 0.8 * size as f64 / (SIZES - 1) as f64;
    let RGBColor(r, g, b) = COLOURS[0];
    let mix = |dark: u8| (255.0 - part * f64::from(255 - dark)) as u8;
    RGBColor(mix(r), mix(g), mix(b))
}

/// Jobs of a device that overlap lie in lanes above each other. Returns the lane of each, and how many there are.
fn lanes(jobs: &[&Done]) -> (Vec<usize>, usize) {
    let mut ends = Vec::new();
    let mut lane = |job: &&Done| {
        let free = ends.iter().position(|end| *end <= job.begin).unwrap_or(ends.len());
        if free == ends.len() {
            ends.push(job.end);
        }
        ends[free] = job.end;
        free
    };
    let lanes = jobs.iter().map(&mut lane).collect();
    (lanes, ends.len())
}

/// A row for each device, a bar for each job.
pub fn draw(path: &Path, done: &[Done], devices: usize) -> Result<()> {
    load_font();
    let mut svg = String::new();
    {
        let height = 160 + 64 * devices as u32;
        let area = SVGBackend::with_string(&mut svg, (1120, height + 40)).into_drawing_area();
        let (above, below) = area.split_vertically(height);
        area.fill(&WHITE)?;
        let most = done.iter().map(|done| done.job.log_n).max().unwrap_or_default();
        let last = done.iter().map(|done| done.end.as_secs_f64()).fold(0.0, f64::max);
        let mut chart = ChartBuilder::on(&above)
            .caption("Jobs on their devices", text(24))
            .margin(18)
            .x_label_area_size(52)
            .y_label_area_size(76)
            .build_cartesian_2d(0.0..1.02e3 * last, (devices as f64 - 0.5)..-0.5)?;
        chart
            .configure_mesh()
            .disable_y_mesh()
            .x_desc("time since the start, ms")
            .y_desc("device")
            .label_style(text(15))
            .axis_desc_style(text(17))
            .axis_style(INK.mix(0.6))
            .bold_line_style(INK.mix(0.12))
            .light_line_style(TRANSPARENT)
            .x_label_formatter(&|x| format!("{x:.0}"))
            .y_labels(devices)
            .y_label_formatter(&|y| format!("{y:.0}"))
            .draw()?;
        for device in 0..devices {
            let mut jobs: Vec<_> = done.iter().filter(|done| done.device == device).collect();
            jobs.sort_by_key(|done| done.begin);
            let (lanes, count) = lanes(&jobs);
            let height = 0.8 / count as f64;
            chart.draw_series(jobs.iter().zip(lanes).flat_map(|(done, lane)| {
                let top = device as f64 - 0.4 + height * lane as f64;
                let milliseconds = |time: std::time::Duration| 1e3 * time.as_secs_f64();
                let corners = [(milliseconds(done.begin), top), (milliseconds(done.end), top + height)];
                let fill = Rectangle::new(corners, colour((most - done.job.log_n) as usize).filled());
                [fill, Rectangle::new(corners, WHITE.stroke_width(1))]
            }))?;
        }
        let corners = [(MIDDLE.0 - 9, MIDDLE.1 - 5), (MIDDLE.0 + 9, MIDDLE.1 + 5)];
        let mark = |size| Rectangle::new(corners, colour(size).filled()).into_dyn();
        let entries = (0..SIZES).map(|size| (mark(size), format!("size 2^{}", most as usize - size)));
        legend(&below.margin(4, 4, 94, 18), SIZES, entries.collect())?;
        area.present()?;
    }
    Ok(fs::write(path, svg)?)
}
