//! The loss curve as a picture, SVG or PNG.

#[path = "../plot/style.rs"]
mod style;

use crate::train::Outcome;
use anyhow::{Result, bail, ensure};
use plotters::{coord::Shift, prelude::*};
use std::{fs, path::Path};
use style::{COLOURS, INK, MIDDLE, legend, load_font, text};

const SIZE: (u32, u32) = (1120, 640);
const FAINT: RGBColor = RGBColor(176, 200, 221);
const LOSS: RGBColor = COLOURS[0];
const ACCURACY: RGBColor = COLOURS[1];

#[derive(Clone, Copy)]
enum Format {
    Svg,
    Png,
}

fn format(path: &Path) -> Result<Format> {
    match path.extension().and_then(|e| e.to_str()).map(str::to_ascii_lowercase).as_deref() {
        Some("svg") => Ok(Format::Svg),
        Some("png") => Ok(Format::Png),
        _ => bail!("--plot {}: the name must end in .svg or .png", path.display()),
    }
}

/// Checks the path before the training, not after.
pub fn check(path: &Path) -> Result<()> {
    format(path)?;
    ensure!(!path.is_dir(), "--plot {}: there is a folder of that name", path.display());
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    if let Some(folder) = folder {
        let there = fs::metadata(folder).is_ok_and(|folder| folder.is_dir());
        ensure!(there, "--plot {}: there is no folder {}", path.display(), folder.display());
    }
    Ok(())
}

/// Draws the loss of every step, the smoothed loss, and the accuracy after every epoch.
pub fn draw(path: &Path, outcome: &Outcome) -> Result<()> {
    load_font();
    match format(path)? {
        Format::Svg => {
            let mut svg = String::new();
            chart(SVGBackend::with_string(&mut svg, SIZE).into_drawing_area(), outcome)?;
            fs::write(path, svg)?;
        }
        Format::Png => {
            // Gives a plain message if the file cannot be written.
            fs::File::create(path)?;
            chart(BitMapBackend::new(path, SIZE).into_drawing_area(), outcome)?;
        }
    }
    Ok(())
}

fn chart<B: DrawingBackend>(area: DrawingArea<B, Shift>, outcome: &Outcome) -> Result<()>
where
    B::ErrorType: 'static,
{
    let losses: Vec<(f64, f64)> = (1..).map(f64::from).zip(outcome.step_losses.iter().map(|l| l.max(1e-6))).collect();
    let steps = losses.len() as f64;
    let lowest = losses.iter().map(|p| p.1).fold(f64::MAX, f64::min);
    let highest = losses.iter().map(|p| p.1).fold(f64::MIN, f64::max);
    let epoch = steps / outcome.accuracies.len() as f64;
    let accuracies: Vec<(f64, f64)> =
        (1..).map(f64::from).zip(&outcome.accuracies).map(|(e, a)| (e * epoch, 100.0 * a)).collect();
    let floor = accuracies.iter().map(|p| p.1).fold(100.0, f64::min);
    let floor = (floor / 10.0).floor() * 10.0;

    area.fill(&WHITE)?;
    let devices = outcome.devices.len();
    let title = format!(
        "Digits, 64-128-10, on {devices} {}: held-out accuracy {:.1} %",
        if devices == 1 { "device" } else { "devices" },
        100.0 * outcome.accuracy()
    );
    let (above, below) = area.split_vertically(SIZE.1 - 40);
    let mut chart = ChartBuilder::on(&above)
        .caption(title, text(24))
        .margin(18)
        .x_label_area_size(52)
        .y_label_area_size(76)
        .right_y_label_area_size(72)
        .build_cartesian_2d(0.0..steps * 1.01, (lowest * 0.8..highest * 1.25).log_scale())?
        .set_secondary_coord(0.0..steps * 1.01, floor..100.0 + (100.0 - floor) * 0.02);
    chart
        .configure_mesh()
        .x_desc("step")
        .y_desc("training loss (cross-entropy)")
        .label_style(text(15))
        .axis_desc_style(text(17))
        .axis_style(INK.mix(0.6))
        .bold_line_style(INK.mix(0.12))
        .light_line_style(INK.mix(0.04))
        .x_label_formatter(&|x| format!("{x:.0}"))
        .y_labels(16)
        .y_label_formatter(&|y| format!("{y}"))
        .draw()?;
    chart
        .configure_secondary_axes()
        .y_desc("held-out accuracy, %")
        .label_style(text(15))
        .axis_desc_style(text(17))
        .axis_style(INK.mix(0.6))
        .y_label_formatter(&|y| format!("{y:.0}"))
        .draw()?;

    chart.draw_series(LineSeries::new(losses.iter().copied(), FAINT.stroke_width(1)))?;
    chart.draw_series(LineSeries::new(smoothed(&losses, epoch), LOSS.stroke_width(3)))?;
    chart.draw_secondary_series(LineSeries::new(accuracies.iter().copied(), ACCURACY.stroke_width(2)))?;
    chart.draw_secondary_series(accuracies.iter().map(|&point| Circle::new(point, 4, ACCURACY.filled())))?;
    let ends = [(MIDDLE.0 - 11, MIDDLE.1), (MIDDLE.0 + 11, MIDDLE.1)];
    let entries = vec![
        (PathElement::new(ends, FAINT.stroke_width(2)).into_dyn(), "loss of each step".to_owned()),
        (PathElement::new(ends, LOSS.stroke_width(3)).into_dyn(), "loss, geometric mean over an epoch".to_owned()),
        (Circle::new(MIDDLE, 4, ACCURACY.filled()).into_dyn(), "held-out accuracy (right axis)".to_owned()),
    ];
    legend(&below.margin(4, 4, 94, 90), 3, entries)?;
    area.present()?;
    Ok(())
}

/// The geometric mean over about an epoch around each step; geometric because the axis is logarithmic.
fn smoothed(points: &[(f64, f64)], window: f64) -> Vec<(f64, f64)> {
    let most = (window / 2.0) as usize;
    let around = |i: usize| {
        // As far ahead as back, so that the steep start is not lifted; near the end less far ahead.
        let back = most.min(i);
        let ahead = back.min(points.len() - 1 - i);
        let near = &points[i - back..=i + ahead];
        (points[i].0, (near.iter().map(|p| p.1.ln()).sum::<f64>() / near.len() as f64).exp())
    };
    (0..points.len()).map(around).collect()
}
